"""Small pictures of numbers as PNG, without any library: heat maps for a page in light or in dark."""

import base64
import struct
import zlib

import torch
from torch import Tensor

POSITIVE, NEGATIVE, GLOW = (38, 128, 220), (224, 92, 52), (255, 112, 0)
"""Colours that stand out from white and from black alike; how much of them there is, is opacity."""


def png(pixels: Tensor) -> bytes:
    """A PNG file of pixels (row, column, channel), bytes; three channels are colours, a fourth is opacity."""
    height, width, channels = pixels.shape
    rows = pixels.to(torch.uint8).reshape(height, width * channels).tolist()
    raw = b"".join(b"\0" + bytes(row) for row in rows)  # each row says first that it is not filtered
    header = struct.pack(">IIBBBBB", width, height, 8, {3: 2, 4: 6}[channels], 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(raw, 9)), (b"IEND", b""))
    chunks = (struct.pack(">I", len(data)) + kind + data + _checksum(kind + data) for kind, data in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def data_uri(pixels: Tensor) -> str:
    """The same, to be written into a page."""
    return f"data:image/png;base64,{base64.b64encode(png(pixels)).decode('ascii')}"


def heat(values: Tensor) -> Tensor:
    """(row, column, 4) pixels of values (row, column) from -1 to 1.

    The sign is the colour, the square root of the size the opacity: small values are seen beside large ones.
    """
    values = values.clamp(-1, 1)
    colours = torch.where((values < 0)[..., None], torch.tensor(NEGATIVE), torch.tensor(POSITIVE))
    opacity = (values.abs().sqrt() * 255).round().to(colours.dtype)
    return torch.cat((colours, opacity[..., None]), dim=-1)


def glow(values: Tensor) -> Tensor:
    """(row, column, 4) pixels to lay over a picture in grey: nothing where values (row, column) are 0, orange at 1."""
    opacity = (values.clamp(0, 1).sqrt() * 0.85 * 255).round().long()
    return torch.cat((torch.tensor(GLOW).expand(*values.shape, 3), opacity[..., None]), dim=-1)


def _checksum(data: bytes) -> bytes:
    return struct.pack(">I", zlib.crc32(data))
