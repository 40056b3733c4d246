"""Shows the numbers of a picture as a picture."""

import struct
import zlib
from base64 import b64encode
from collections.abc import Sequence

_MAGIC = b"\x89PNG\r\n\x1a\n"


def draw_picture(pixels: Sequence[float], width: int, black: float, white: float) -> str:
    """Return a grey picture as the address of a PNG that is in the address itself.

    black, white: the values of the darkest and the brightest pixel; others lie between.
    """
    span = (white - black) or 1.0
    grey = bytes(round(255 * min(max((value - black) / span, 0.0), 1.0)) for value in pixels)
    rows = [b"\0" + grey[start : start + width] for start in range(0, len(grey), width)]
    header = struct.pack(">IIBBBBB", width, len(rows), 8, 0, 0, 0, 0)
    parts = (_chunk(b"IHDR", header), _chunk(b"IDAT", zlib.compress(b"".join(rows))), _chunk(b"IEND", b""))
    return "data:image/png;base64," + b64encode(_MAGIC + b"".join(parts)).decode()


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
