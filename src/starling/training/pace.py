"""When a learner opens the next averaging round, and whether its background keeps up."""

ENOUGH_GRADIENTS = 100
"""Below this number of gradients a learner's rate of rounds is not checked."""
FEW_ROUNDS = 0.4
"""A learner warns if it made less than this fraction of the rounds that its period specifies. With the default
`max_lag` the fraction stays above 0.5."""


class Pace:
    """Whether a learner has made enough gradients to open another round, and how far it is ahead of its rounds.

    Each gradient earns a credit of 1 / period rounds, and each round costs one, whichever learner opened it: so each
    round is opened once, for all learners. Credit and debt are bounded: rounds missed during a delay are not made up
    for, and if the fastest learner leaves, a slower one soon opens rounds instead.
    """

    def __init__(self) -> None:
        self.period = 1.0
        self.num_gradients = self.num_rounds = 0
        self._credit = 0.0
        self._ahead = 0  # gradients since this learner completed a round
        self._is_due = False  # whether its background has a round to do

    @property
    def may_open(self) -> bool:
        return self._credit >= 1.0

    def gradient_made(self) -> None:
        """Record a gradient."""
        self.num_gradients += 1
        self._ahead += 1
        self._credit = min(self._most, self._credit + 1.0 / self.period)

    def opened(self) -> None:
        """Record that this learner opened a round, which its background will enter."""
        self._is_due = True

    def entered(self) -> None:
        """Record that a round began, opened by any learner."""
        self._is_due = True
        self.num_rounds += 1
        self._credit = max(-self._most, self._credit - 1.0)

    def completed(self) -> None:
        """Record that this learner's background has completed its round, if one was due."""
        if self._is_due:
            self._ahead = 0
        self._is_due = False

    def lags(self, most: float) -> bool:
        """Whether a round is under way and at least `most` gradients were made since the last completed one."""
        return self._is_due and self._ahead >= most

    def complaint(self) -> str | None:
        """A warning with its remedy if there were far fewer rounds than the period specifies; otherwise None."""
        if self.num_gradients < ENOUGH_GRADIENTS or self.num_rounds * self.period >= FEW_ROUNDS * self.num_gradients:
            return None
        return (
            f"made {self.num_rounds / self.num_gradients:.2g} averaging rounds per gradient; a period of "
            f"{self.period:g} asks for {1.0 / self.period:.2g}. Learners that average so rarely train almost "
            "independently. Lower strategy.max_lag, or raise strategy.period to what network and cores can sustain"
        )

    @property
    def _most(self) -> float:
        """The bound of credit and debt: the credit of one gradient, but at least one round."""
        return max(1.0, 1.0 / self.period)
