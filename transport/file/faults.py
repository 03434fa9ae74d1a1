"""What a store's failure means: obstore's and the system's errors as errors of ours.

Owns the mapping. Owns no retry and no I/O. obstore hands most failures on as text ("... (os error 28)", "status
code: 503 ..."), so text is what there is to go by; ``tests/test_file_transport.py`` provokes the real ones.
"""

from __future__ import annotations

import errno
import re
from typing import Literal

from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

from weight_sync.errors import StoreError, StoreFullError, StoreReadOnlyError, StoreUnavailableError

__all__ = ["FAILURES", "Action", "names_no_bucket", "store_error"]

Action = Literal["read", "write", "delete", "list", "open"]

FAILURES = (BaseError, OSError, ValueError)
"""What obstore and the file system raise; catch these around a store call and hand them to ``store_error``."""

_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_MAY_PASS = frozenset(
    {
        errno.EAGAIN,
        errno.EBUSY,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EIO,
        errno.EMFILE,
        errno.ENETUNREACH,
        errno.ENFILE,
        errno.ESTALE,
        errno.ETIMEDOUT,
    }
)
_FULL_TEXT = re.compile(r"InsufficientStorage|QuotaExceeded|StorageFull|507 Insufficient")
_DENIED_TEXT = re.compile(r"AccessDenied|status code: 40[13]\b|AuthorizationFailure|InvalidAccessKeyId")
_NO_BUCKET_TEXT = re.compile(r"NoSuchBucket|ContainerNotFound|bucket does not exist", re.IGNORECASE)
_MAY_PASS_TEXT = re.compile(
    r"HTTP error|timed? ?out|status code: (5\d\d|408|429)\b|connection|SlowDown|Error performing token request",
    re.IGNORECASE,
)


def store_error(error: BaseException, action: Action, name: str) -> StoreError:
    """The error to raise, ``from error``, when ``action`` on the object or store ``name`` failed."""
    text = _first_line(error)
    code = _os_code(error, text)
    what = f"cannot {action}"
    if code in _FULL or _FULL_TEXT.search(text):
        return StoreFullError(what, field=name, found=text, do="free space in the store or run weight-sync gc")
    if _NO_BUCKET_TEXT.search(text):
        return StoreError(what, field=name, found=text, do="create the bucket or correct weight_sync.uri")
    denied = isinstance(error, PermissionDeniedError | UnauthenticatedError | PermissionError)
    if denied or code in _DENIED or _DENIED_TEXT.search(text):
        if action in ("write", "delete"):
            return StoreReadOnlyError(
                what, field=name, found=text, do="let this process write there, or give it other credentials"
            )
        return StoreError(what, field=name, found=text, do="let this process read there")
    if code in _MAY_PASS or (code is None and _MAY_PASS_TEXT.search(text)):
        return StoreUnavailableError(what, field=name, found=text, do="try again; check the store and the network")
    return StoreError(what, field=name, found=text, do="check weight_sync.uri and weight_sync.store_options")


def names_no_bucket(error: BaseException) -> bool:
    """True for a "not found" that is about the bucket, which must not be taken for an absent object."""
    return _NO_BUCKET_TEXT.search(str(error)) is not None


def _first_line(error: BaseException) -> str:
    text = str(error).partition("\n\nDebug source")[0]
    text = re.sub(r"\?[^\s:]+", "?...", text)  # query strings may carry signatures
    return text if len(text) <= 400 else text[:400] + "..."


def _os_code(error: BaseException, text: str) -> int | None:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    found = _OS_ERROR.search(text)
    return int(found[1]) if found else None
