"""The version protocol as protobuf messages; ``v1/*.proto`` is the source, ``make proto`` generates the rest."""
