"""When a learner opens the next averaging round, and whether its background keeps up."""

ENOUGH_GRADIENTS = 100
"""A learner's rounds per gradient are judged after so many gradients."""
FEW_ROUNDS = 0.4
"""A learner complains of fewer than this part of the rounds that its period asks for; the default of `max_lag` keeps it
above 0.5."""


class Pace:
    """Whether a learner has made enough gradients to open another round, and how far it is ahead of its rounds.

    Each gradient earns 1 / period rounds of credit, and each round costs one, whichever learner opened it: so among
    equally fast learners one opens the rounds for all. Credit and debt are bounded: rounds missed in a jam are not made
    up for, and when the fastest learner leaves, a slower one soon opens rounds in its place.
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
        """One more gradient."""
        self.num_gradients += 1
        self._ahead += 1
        self._credit = min(self._most, self._credit + 1.0 / self.period)

    def opened(self) -> None:
        """This learner opened a round, which its background will enter."""
        self._is_due = True

    def entered(self) -> None:
        """A round began, opened by any learner."""
        self._is_due = True
        self.num_rounds += 1
        self._credit = max(-self._most, self._credit - 1.0)

    def completed(self) -> None:
        """This learner's background has done its round, if it had one to do."""
        if self._is_due:
            self._ahead = 0
        self._is_due = False

    def lags(self, most: float) -> bool:
        """Whether the background is in a round and `most` gradients or more were made since the one before."""
        return self._is_due and self._ahead >= most

    def complaint(self) -> str | None:
        """What is wrong with this pace, and the remedy, if rounds were far fewer than the period asks for."""
        if self.num_gradients < ENOUGH_GRADIENTS or self.num_rounds * self.period >= FEW_ROUNDS * self.num_gradients:
            return None
        return (
            f"made {self.num_rounds / self.num_gradients:.2g} averaging rounds per gradient, where a period of "
            f"{self.period:g} asks for {1.0 / self.period:.2g}: learners that average so rarely train nearly apart. "
            "Lower strategy.max_lag, or raise strategy.period to what the link and the cores can carry"
        )

    @property
    def _most(self) -> float:
        """What one gradient is worth, or what one round costs if that is more."""
        return max(1.0, 1.0 / self.period)
