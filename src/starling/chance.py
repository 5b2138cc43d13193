"""Seeds that are a pure function of their purpose, so that random choices never depend on the order of learners."""

import hashlib


def derive_seed(seed: int, *purpose: str | int) -> int:
    """A seed in [0, 2^63) for one purpose, e.g. `derive_seed(run_seed, "dropout", epoch, index)`."""
    text = "/".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
