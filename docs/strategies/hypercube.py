"""A pattern from outside: in round k each learner pairs with the learner whose rank differs in bit k."""


def hypercube(k: int, rank: int, world: int) -> dict[int, float]:
    """For 2, 4, 8, … learners: `log2 world` rounds in a row average exactly."""
    bits = world.bit_length() - 1
    return {rank ^ (1 << k % bits): 0.5} if bits else {}
