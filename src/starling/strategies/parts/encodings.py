"""Lossy encodings of vectors for sending."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

BLOCK = 256
"""Number of values that share a scale."""
WIDE_BLOCK = 4096
"""Number of values among which some are chosen together, with places in 2 bytes."""


class Encoding(Protocol):
    """Turns a float32 vector `[n]` into bytes, and bytes into a vector near it."""

    def num_bytes(self, size: int) -> int:
        """The number of bytes of an encoded vector `[size]`."""

    def encode(self, vector: Tensor) -> Tensor:
        """The bytes `[num_bytes(n)]` of a vector `[n]`, uint8."""

    def decode(self, encoded: Tensor, size: int) -> Tensor:
        """The vector `[size]` that the receivers of `encoded` use."""


class Bfloat16(Encoding):
    """Encodes each number with 8 bits of its mantissa: 2 n bytes."""

    def num_bytes(self, size: int) -> int:
        return 2 * size

    def encode(self, vector: Tensor) -> Tensor:
        return vector.to(torch.bfloat16).view(torch.uint8)

    def decode(self, encoded: Tensor, size: int) -> Tensor:
        return encoded.clone().view(torch.bfloat16).to(torch.float32)


class Integers(Encoding):
    """Integers of 8 or 4 bits, times a float32 scale for each block of 256 numbers: n bits / 8 + 4 n / 256 bytes.

    Equation, for a block v, with m = 127 or 7::

        s = max |v| / m,  q = round(v / s),  decoded: s q

    No number changes by more than s / 2. Rounding is to even, and draws no random numbers.
    """

    def __init__(self, bits: int) -> None:
        self._bits, self._levels = bits, 2 ** (bits - 1) - 1

    def num_bytes(self, size: int) -> int:
        return 4 * _blocks(size) + (size * self._bits + 7) // 8

    def encode(self, vector: Tensor) -> Tensor:
        size = len(vector)
        blocks = vector.new_zeros(_blocks(size) * BLOCK)
        blocks[:size] = vector
        blocks = blocks.view(-1, BLOCK)
        scales = blocks.abs().amax(dim=1) / self._levels
        divisors = torch.where(scales == 0.0, torch.ones_like(scales), scales)
        # a block that is not finite decodes to NaN through its scale, whatever its integers are
        integers = torch.nan_to_num((blocks / divisors[:, None]).round_()).to(torch.int8).view(-1)
        if self._bits == 4:
            nibbles = (integers + 8).view(torch.uint8)
            packed = nibbles[0::2] | (nibbles[1::2] << 4)
            return torch.cat([scales.view(torch.uint8), packed[: (size + 1) // 2]])
        return torch.cat([scales.view(torch.uint8), integers[:size].view(torch.uint8)])

    def decode(self, encoded: Tensor, size: int) -> Tensor:
        count = _blocks(size)
        scales = encoded[: 4 * count].clone().view(torch.float32)
        if self._bits == 4:
            packed = encoded[4 * count :]
            pairs = torch.stack([packed & 15, packed >> 4], dim=1).view(-1)[:size]
            integers = pairs.to(torch.float32) - 8.0
        else:
            integers = encoded[4 * count :].view(torch.int8).to(torch.float32)
        return integers * scales.repeat_interleave(BLOCK)[:size]


class Largest(Encoding):
    """Encodes the k = max(1, round(fraction n)) numbers of largest magnitude with their places, in 8 k bytes; all
    others are 0."""

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction

    def num_bytes(self, size: int) -> int:
        return 8 * self._count(size)

    def encode(self, vector: Tensor) -> Tensor:
        places = torch.topk(vector.abs(), self._count(len(vector)), sorted=False).indices.sort().values
        return torch.cat([vector[places].view(torch.uint8), places.to(torch.int32).view(torch.uint8)])

    def decode(self, encoded: Tensor, size: int) -> Tensor:
        half = 4 * self._count(size)
        vector = torch.zeros(size, device=encoded.device)
        vector[encoded[half:].clone().view(torch.int32).long()] = encoded[:half].clone().view(torch.float32)
        return vector

    def _count(self, size: int) -> int:
        return min(size, max(1, round(self._fraction * size)))


class CoarseLargest(Encoding):
    """Encodes the k = max(1, round(4096 fraction)) largest of every 4096 numbers in 2 bits: 2 k + k / 4 + 4 bytes.

    Equation, for the chosen numbers v of a block, with their places in 2 bytes each::

        s = max |v| / 3,  q = the nearest of -3, -1, 1, 3 to v / s,  decoded: s q

    A number that is 0 is not sent: the largest takes its place in the message.
    """

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction

    def num_bytes(self, size: int) -> int:
        return sum(rows * (4 + 2 * k + -(-k // 4)) for rows, _, k in self._parts(size))

    def encode(self, vector: Tensor) -> Tensor:
        encoded, start = [], 0
        for rows, width, k in self._parts(len(vector)):
            encoded += self._encode_rows(vector[start : start + rows * width].view(rows, width), k)
            start += rows * width
        return torch.cat([each.contiguous().view(-1).view(torch.uint8) for each in encoded])

    def decode(self, encoded: Tensor, size: int) -> Tensor:
        decoded, start = [], 0
        for rows, width, k in self._parts(size):
            sizes = [4 * rows, 2 * k * rows, -(-k // 4) * rows]
            scales, places, packed = torch.split(encoded[start : start + sum(sizes)].clone(), sizes)
            codes = torch.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)], dim=1).view(rows, -1)[:, :k].float()
            values = (1.0 + 2.0 * (codes % 2)) * (1.0 - 2.0 * (codes >= 2)) * scales.view(torch.float32)[:, None]
            where = places.clone().view(torch.int16).view(rows, k).long()
            decoded.append(torch.zeros(rows, width, device=encoded.device).scatter_(1, where, values).view(-1))
            start += sum(sizes)
        return torch.cat(decoded)

    def _parts(self, size: int) -> list[tuple[int, int, int]]:
        """The rows of equal width, as (rows, width, numbers sent of each): the whole blocks, then the remainder."""
        shapes = ((size // WIDE_BLOCK, WIDE_BLOCK), (1, size % WIDE_BLOCK))
        return [(rows, width, max(1, round(self._fraction * width))) for rows, width in shapes if rows and width]

    @staticmethod
    def _encode_rows(rows: Tensor, k: int) -> list[Tensor]:
        places = torch.topk(rows.abs(), k, dim=1, sorted=False).indices.sort(dim=1).values
        values = rows.gather(1, places)
        largest = values.abs().argmax(dim=1, keepdim=True)
        places = torch.where(values == 0.0, places.gather(1, largest), places)
        values = rows.gather(1, places)
        scales = rows.gather(1, places.gather(1, largest)).abs() / 3.0
        codes = 2 * (values < 0.0).to(torch.uint8) + (values.abs() > 2.0 * scales).to(torch.uint8)
        codes = torch.nn.functional.pad(codes, (0, -k % 4)).view(len(rows), -1, 4)
        packed = codes[..., 0] | codes[..., 1] << 2 | codes[..., 2] << 4 | codes[..., 3] << 6
        return [scales, places.to(torch.int16), packed]


def _blocks(size: int) -> int:
    return -(-size // BLOCK)
