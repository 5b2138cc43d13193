"""How long the launcher, its learners and the reports wait, and how often they look; each value with its reason.

All values are seconds. What a user may want to change is in the recipe instead: `engine.timeout_seconds` and
`engine.explain_seconds`.
"""

Seconds = float

# Liveness

HEARTBEAT_EVERY: Seconds = 0.5
"""Between two heartbeats. Twice a second costs a learner about 20 µs a second, and dates a stall to half a second."""
SILENT_AFTER: Seconds = 3.0
"""A learner that has sent nothing for so long is shown as silent. Six missed heartbeats: a garbage collection, a large
allocation or a busy machine delays two or three."""
STOPPED_AFTER: Seconds = 2.0
"""A heartbeat that is so late says that the whole process was stopped. The thread that sends it waits for nothing but
the processor."""
JOINER_FRESH: Seconds = 5.0
"""A joiner is let in only if it was heard from so recently, since all others wait for it. Ten heartbeats."""
JOINER_SILENT: Seconds = 10.0
"""A joiner that the others wait for is killed after so much silence. It has no work to lose, and they are stalled."""
ENTRY: Seconds = 30.0
"""How long members wait for a joiner to arrive where they meet. It has loaded its libraries already, so that it needs
seconds; once it has arrived it may take `engine.timeout_seconds`, as a large model's state travels to it."""

# Starting and ending processes

CONNECT: Seconds = 600.0
"""How long a learner tries to reach the store when the recipe does not say. Slurm may start nodes minutes apart."""
SET_UP: Seconds = 2 * 24 * 3600.0
"""How long learners of torchrun or Slurm wait while learner 0 prepares the data. Preparing a large corpus takes a day;
the death of learner 0 ends the wait at once."""
EXPLANATION: Seconds = 1.0
"""How long the launcher looks for the cause when a learner reports only that it lost another. The cause usually comes
within milliseconds, on the line of a process that is just ending."""
STOP: Seconds = 28.0
"""How long learners may take to save and end after a signal. Slurm and Kubernetes kill everything after 30 s."""
TERMINATION: Seconds = 5.0
"""How long a learner may take to end after SIGTERM before it is killed. One that is able to end needs less than 1 s."""
LOADERS: Seconds = 2.0
"""How long loading processes may take to clean up after their learner has ended: they remove semaphores and sockets."""
READ: Seconds = 0.05
"""How long the launcher waits for messages before it looks at its processes again: the delay with which a death is
noticed."""

# Requests of other commands

REQUESTS_EVERY: Seconds = 0.5
"""Between two looks of the launcher into the folder of join requests. A joiner takes seconds to start."""
ANSWER_EVERY: Seconds = 0.1
"""Between two looks of `starling join` for its answer."""
LOCK: Seconds = 0.5
"""How long a launcher tries to lock the folder of join requests: other commands hold the lock while they look at it."""

# Reports

SEND_EVERY: Seconds = 0.2
"""Between two progress messages of a learner. The table on a terminal is redrawn four times a second."""
CURVES_EVERY: Seconds = 1.0
"""Between two points of a learner's curves: an hour then has 3600, more than a screen is wide."""
LOG_EVERY: Seconds = 5.0
"""Between two progress lines in a learner's own log."""
SCREEN_EVERY: Seconds = 60.0
"""Without a terminal, a line about all learners is printed if there was none for so long, as in a long epoch."""
SCORE_WAIT: Seconds = 5.0
"""How long a validation score waits for the next epoch line before it is printed on a line of its own."""
LOOK_EVERY: Seconds = 1.0
"""Between two looks of the launcher at stalls, and two writings of `status.json`."""
STATUS_FRESH: Seconds = 10.0
"""The launcher of a status that is older does not run, or is stalled: it writes one a second."""
SHORT_WAIT: Seconds = 1.0
"""Shorter waits are not reported to the launcher: every averaging round has some."""
