"""A pattern for push-sum: learner 0 is heard by one more learner than hears it, another one in each round."""


def loud(k: int, rank: int, world: int) -> dict[int, float]:
    """Each learner hears its left neighbour; in round k one of them also, or more, hears learner 0."""
    if world == 1:
        return {}
    taken = {(rank - 1) % world: 0.25}
    if rank == 1 + k % (world - 1):
        taken[0] = taken.get(0, 0.0) + 0.25
    return taken
