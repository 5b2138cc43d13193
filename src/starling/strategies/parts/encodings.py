"""Lossy encodings of vectors for sending, and the ways in which the mean of encoded vectors is computed: each learner
sends to all others, through owners of chunks, or with low-rank factors."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from starling.errors import ConfigError
from starling.learner import EncodedMean, Handle, Learner

BLOCK = 256
"""Number of values that share a scale."""
WIDE_BLOCK = 4096
"""Number of values among which some are chosen together, with places in 2 bytes."""


class Encoding(Protocol):
    """Converts a float32 vector `[n]` to bytes, and the bytes to an approximation of the vector."""

    def num_bytes(self, size: int) -> int:
        """Return the number of bytes of an encoded vector `[size]`."""

    def encode(self, vector: Tensor) -> Tensor:
        """Return the encoded vector `[n]` as bytes `[num_bytes(n)]`, uint8."""

    def decode(self, encoded: Tensor, size: int) -> Tensor:
        """Return the vector `[size]` that the receivers of `encoded` use."""


class Bfloat16(Encoding):
    """Rounds each number to 8 significant bits: 2 n bytes."""

    def num_bytes(self, size: int) -> int:
        return 2 * size

    def encode(self, vector: Tensor) -> Tensor:
        return vector.to(torch.bfloat16).view(torch.uint8)

    def decode(self, encoded: Tensor, size: int) -> Tensor:
        return encoded.clone().view(torch.bfloat16).to(torch.float32)


class Integers(Encoding):
    """Integers of 8, 4 or 2 bits, times a float32 scale for each block of 256 numbers: n bits / 8 + 4 n / 256 bytes.

    Equation, for a block v, with m = 127, 7 or 1::

        s = max |v| / m,  q = round(v / s),  decoded: s q

    No number changes by more than s / 2. Rounding is to even, and draws no random numbers.
    """

    def __init__(self, bits: int) -> None:
        self._bits, self._levels = bits, 2 ** (bits - 1) - 1
        self._shifts = range(0, 8, bits)

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
        if self._bits == 8:
            return torch.cat([scales.view(torch.uint8), integers[:size].view(torch.uint8)])
        codes = (integers + self._levels + 1).view(torch.uint8).view(-1, len(self._shifts))
        packed = sum(codes[:, place] << shift for place, shift in enumerate(self._shifts))
        return torch.cat([scales.view(torch.uint8), packed[: (size * self._bits + 7) // 8]])

    def decode(self, encoded: Tensor, size: int) -> Tensor:
        count, mask = _blocks(size), 2**self._bits - 1
        scales, packed = encoded[: 4 * count].clone().view(torch.float32), encoded[4 * count :]
        if self._bits == 8:
            integers = packed.view(torch.int8).to(torch.float32)
        else:
            codes = torch.stack([packed >> shift & mask for shift in self._shifts], dim=1).view(-1)[:size]
            integers = codes.to(torch.float32) - (self._levels + 1)
        return integers * scales.repeat_interleave(BLOCK)[:size]


class Largest(Encoding):
    """Encodes the k = max(1, round(fraction n)) numbers of largest magnitude, with their positions, in 8 k bytes. All
    other numbers become 0."""

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

    A number that is 0 is not sent. The largest number takes its place in the message.
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
        """Return the groups of rows of equal width, as (rows, width, numbers sent of each row). The whole blocks come
        first, and then the remainder."""
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


class GatheredMean:
    """A mean of sparse vectors. Each learner sends its vector to all others, and every learner adds all vectors.

    Equation, for L learners, with v_l learner l's vector, e_l its residual and C the encoding::

        q_l = C(v_l + e_l),  e_l <- v_l + e_l - q_l,  mean = (1/L) sum_l q_l

    Every number that any learner has sent enters the mean as it was sent. Each learner sends its message L - 1 times.
    All learners add in rank order, so their results are bit-identical.

    References:
        Aji & Heafield 2017, "Sparse Communication for Distributed Gradient Descent", EMNLP, arXiv 1704.05021.
        Lin et al. 2018, "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training",
        arXiv 1712.01887.
    """

    def __init__(self, me: Learner, encoding: Encoding, total: Tensor, left: Tensor) -> None:
        """Encode `total`, which is v_l + e_l `[n]`. The part of `total` that is not sent is written to `left` `[n]`."""
        self._me, self._encoding, self._total = me, encoding, total
        if total.is_meta:
            sent = total.new_empty(encoding.num_bytes(len(total)), dtype=torch.uint8)
        else:
            sent = encoding.encode(total)
            self._own = encoding.decode(sent, len(total))
            torch.sub(total, self._own, out=left)
        self._exchanges = {peer: me.exchange(peer, sent, tag=0) for peer in range(me.world) if peer != me.rank}

    def __await__(self) -> Generator[Handle[Any], None, Tensor]:
        mean, size = torch.zeros_like(self._total), len(self._total)
        for rank in range(self._me.world):
            sent = (yield from self._exchanges[rank].__await__()) if rank in self._exchanges else None
            if not mean.is_meta:
                mean += self._own if sent is None else self._encoding.decode(sent, size)
        return mean.div_(self._me.world)


class OwnersMean(EncodedMean):
    """A mean for which each of L learners owns one of L equal chunks. An owner gathers its chunk from all learners, and
    sends the mean of the chunk to them.

    Equation, for the chunk of owner o, with v_l learner l's vector, e_l its residual and C the encoding::

        l to o:        q_l = C(v_l + e_l),  e_l <- v_l + e_l - q_l        for all l but o
        o to all:      s = (v_o + e_o + sum_l q_l) / L,  mean = C(s),  e_o <- L (s - mean)

    The owner adds its own vector exactly. The part of the mean that it does not send is multiplied by L, which makes it
    comparable with a vector, and is added to the owner's vector in the next mean. All learners add in rank order, so
    their results are bit-identical. Each learner sends 2 (L - 1) times the bytes of a chunk.

    References:
        Seide et al. 2014, "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training
        of Speech DNNs", Interspeech, which has both exchanges.
        Tang et al. 2019, "DoubleSqueeze: Parallel Stochastic Gradient Descent with Double-Pass Error-Compensated
        Compression", arXiv 1905.05957.
    """

    def __init__(self, me: Learner, encoding: Encoding, total: Tensor, left: Tensor) -> None:
        """Prepare the mean of `total`, which is v_l + e_l `[n]`. The part of `total` that is not sent is written to
        `left` `[n]`."""
        self.vector = total
        self._rank, self._encoding, self._left = me.rank, encoding, left
        self._chunk = -(-len(total) // me.world)
        self.message_bytes = encoding.num_bytes(self._chunk)
        if not total.is_meta:
            padded = torch.zeros(self._chunk * me.world)
            padded[: len(total)] = total
            self._chunks = padded.view(me.world, self._chunk)
        self._handle = me.mean(self)

    def __await__(self) -> Generator[Handle[Any], None, Tensor]:
        return self._handle.__await__()

    def messages(self) -> list[Tensor]:
        sent = []
        for owner, chunk in enumerate(self._chunks):
            if owner == self._rank:
                sent.append(torch.zeros(self.message_bytes, dtype=torch.uint8))
                continue
            sent.append(self._encoding.encode(chunk))
            chunk.sub_(self._encoding.decode(sent[-1], self._chunk))
        return sent

    def combine(self, received: Sequence[Tensor]) -> Tensor:
        own, total = self._chunks[self._rank], torch.zeros(self._chunk)
        for rank, each in enumerate(received):
            total.add_(own if rank == self._rank else self._encoding.decode(each, self._chunk))
        mean = self._encoding.encode(total.div_(len(received)))
        torch.sub(total, self._encoding.decode(mean, self._chunk), out=own).mul_(len(received))
        self._left.copy_(self._chunks.view(-1)[: len(self._left)])
        return mean

    def result(self, combined: Sequence[Tensor]) -> Tensor:
        return torch.cat([self._encoding.decode(each, self._chunk) for each in combined])[: len(self.vector)]


class LowRankMeans:
    """Means in which each matrix is the product of two thin factors.

    Equation, for a matrix M_l `[n, m]` of learner l (a parameter of at least two dimensions, of which the first gives
    the rows and all others the columns), with e_l its residual and Q `[m, r]` the second factor of the previous mean,
    which is initially random and the same on all learners::

        M_l <- M_l + e_l
        P <- orthogonalise((1/L) sum_l M_l Q)
        Q_l <- M_l^T P,  e_l <- M_l - P Q_l^T
        Q <- (1/L) sum_l Q_l,  mean = P Q^T

    This is one step of subspace iteration towards the r largest singular vectors of the mean. Vectors, and matrices
    that two factors would not make smaller, are averaged without encoding.

    References:
        Vogels et al. 2019, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
        arXiv 1905.13727.
    """

    def __init__(self, me: Learner, rank: int) -> None:
        if me.weights.device.type == "meta":
            raise ConfigError(
                "strategy.compression: the bytes of low_rank depend on the shapes of the model's matrices, which a "
                "simulation of time alone does not know; choose another compression to plan with"
            )
        self._me, self._rank = me, rank
        self._matrices: list[tuple[slice, int, int]] = []  # place in the weights, rows, columns
        self._others: list[slice] = []
        start = 0
        for shape in me.optimizer.shapes:
            stop, rows = start + shape.numel(), shape[0] if len(shape) > 1 else 1
            columns = shape.numel() // max(1, rows)
            if rank * (rows + columns) < rows * columns:
                self._matrices.append((slice(start, stop), rows, columns))
            else:
                self._others.append(slice(start, stop))
            start = stop
        size = rank * sum(columns for _, _, columns in self._matrices)
        random = torch.randn(size, generator=torch.Generator().manual_seed(me.seed))
        self._basis = me.strategy_state("basis", random.to(me.weights.device))

    async def mean(self, vector: Tensor, total: Tensor, left: Tensor) -> Tensor:
        """Return the mean of the vectors `[P]`. `total` is `vector` plus e_l, and the part of `total` that is not sent
        is written to `left`."""
        matrices = [total[place].view(rows, columns) for place, rows, columns in self._matrices]
        others = [vector[piece] for piece in self._others]
        bases = self._split(self._basis, [columns for _, _, columns in self._matrices])
        products = [matrix @ basis for matrix, basis in zip(matrices, bases, strict=True)]
        first = await self._me.mean(torch.cat([each.reshape(-1) for each in (*products, *others)]))
        if not bool(first.isfinite().all()):
            return torch.full_like(vector, torch.nan)
        p_of_all = [torch.linalg.qr(each)[0] for each in self._split(first, [rows for _, rows, _ in self._matrices])]
        own = [matrix.T @ p for matrix, p in zip(matrices, p_of_all, strict=True)]
        for (place, _, _), matrix, p, q in zip(self._matrices, matrices, p_of_all, own, strict=True):
            left[place] = (matrix - p @ q.T).view(-1)
        if self._matrices:
            self._basis.copy_(await self._me.mean(torch.cat([each.reshape(-1) for each in own])))
        mean, start = torch.empty_like(vector), sum(each.numel() for each in products)
        for (place, _, _), p, q in zip(self._matrices, p_of_all, bases, strict=True):
            mean[place] = (p @ q.T).view(-1)
        for piece, other in zip(self._others, torch.split(first[start:], [len(each) for each in others]), strict=True):
            mean[piece] = other
        return mean

    def _split(self, vector: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Return matrices `[size, r]` that are consecutive views into the beginning of a vector."""
        numbers = [size * self._rank for size in sizes]
        return [each.view(-1, self._rank) for each in torch.split(vector[: sum(numbers)], numbers)]
