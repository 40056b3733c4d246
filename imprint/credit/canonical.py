"""Encodes values as canonical JSON. These exact bytes are hashed, signed and stored."""

import json
from typing import Any

from imprint.errors import CreditError, DamagedLog

_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def encode(value: Any) -> bytes:
    """Return plain values as JSON in UTF-8, with sorted keys and no spaces. NaN and infinity are refused.

    >>> encode({"b": 0.1, "a": ["ü", None]}).decode()
    '{"a":["ü",null],"b":0.1}'
    """
    try:
        return _ENCODER.encode(value).encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise CreditError(f"this cannot be written to an entry: {error}.") from error


def decode(content: bytes) -> Any:
    """Read values from bytes that `encode` wrote; refuse anything that is not in canonical form."""
    try:
        value = json.loads(content.decode())
        if encode(value) == content:
            return value
    except (ValueError, RecursionError, CreditError) as error:
        raise DamagedLog(f"an entry is damaged: {error}.") from error
    raise DamagedLog("an entry is damaged: it is not in canonical form.")


def decode_object(content: bytes) -> dict[str, Any]:
    """Read an object with names and values, as `decode` does."""
    value = decode(content)
    if not isinstance(value, dict):
        raise DamagedLog("an entry is damaged: it is not a JSON object.")
    return value
