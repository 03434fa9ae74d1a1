"""Makes remote_site importable for the tests of every host. Owns no fixture."""
