"""Time limits and polling intervals of the launcher, its learners and the reports, in seconds, with reasons.

The limits that users may want to change are in the recipe: `engine.timeout_seconds` and `engine.explain_seconds`.
"""

Seconds = float

# Liveness

HEARTBEAT_EVERY: Seconds = 0.5
"""The interval of heartbeats. They cost a learner about 20 µs per second, and locate the beginning of a stall to half a
second."""
SILENT_AFTER: Seconds = 3.0
"""A learner that has sent nothing for this time is shown as silent. It corresponds to six missed heartbeats; a garbage
collection, a large allocation or a busy machine delays two or three."""
STOPPED_AFTER: Seconds = 2.0
"""If a heartbeat is this late, the whole process did not run: the thread that sends it waits only for the processor."""
JOINER_FRESH: Seconds = 5.0
"""A joiner is admitted only if its last message is at most this old, because all others then wait for it."""
JOINER_SILENT: Seconds = 10.0
"""A joiner for which the others wait is killed after this time of silence. It has no work to lose, and the others are
stalled."""
ENTRY: Seconds = 30.0
"""How long members wait for a joiner to arrive. It has already loaded its libraries, so it needs only seconds. After
its arrival it has `engine.timeout_seconds`, because a large model's state must travel to it."""

# Starting and ending processes

CONNECT: Seconds = 600.0
"""How long a learner tries to reach the store unless the recipe says otherwise. Slurm may start nodes minutes apart."""
SET_UP: Seconds = 2 * 24 * 3600.0
"""How long the learners of torchrun or Slurm wait while learner 0 prepares the data, which takes a day for a large
corpus. If learner 0 dies, the wait ends at once."""
EXPLANATION: Seconds = 1.0
"""How long the launcher waits for the cause after a learner has reported that it lost another one. The cause usually
arrives within milliseconds, from a process that is just exiting."""
STOP: Seconds = 28.0
"""How long learners may take to save and end after a signal. Slurm and Kubernetes kill everything after 30 s."""
TERMINATION: Seconds = 5.0
"""How long a learner may take to exit after SIGTERM before it is killed. Normally it takes less than 1 s."""
LOADERS: Seconds = 2.0
"""How long loading processes may take to remove their semaphores and sockets after their learner has exited."""
READ: Seconds = 0.05
"""How long a launcher or a coordinator waits for messages before it looks after its learners again."""

# Joined loops that outlive losses

FULL_PAUSE: Seconds = 0.1
"""How long a process that cannot open more files waits before it accepts a connection again."""
CAUSE: Seconds = 5.0
"""How long a learner that lost a connection waits for the announcement that explains it. The announcement takes
milliseconds if a process died, and up to 9 s if a machine did; until it comes, the error is a lost peer, and `REGROUP`
applies."""
REGROUP: Seconds = 20.0
"""How long a learner that lost a peer waits for the next membership before the loss is its error."""

# A cluster

DOOR: Seconds = 5.0
"""How long a connection between a launcher and a node may take to prove that it belongs to the run."""
UNREACHABLE: Seconds = 6.0
"""A machine whose kernel has not answered for this time counts as lost. Routes and switches recover within seconds, and
both sides of a partition must have noticed within 10 s."""
NODE_SILENT: Seconds = 1.0
"""How long the launcher waits, after a learner's connection has closed, for Ray to report how the learner ended."""
NODE_LOSS: Seconds = 0.7
"""How long the launcher waits for the loss of a node's other learners after the first one. They are noticed within half
a second of each other, and each new membership costs the survivors more than that."""
ROOM: Seconds = 10.0
"""How long learners wait for room in the cluster before the run reports it; it reports it again after ten times as
long."""

# Requests of other commands

REQUESTS_EVERY: Seconds = 0.5
"""The interval at which the launcher looks for join requests. A joiner takes seconds to start."""
ANSWER_EVERY: Seconds = 0.1
"""The interval at which `starling join` looks for its answer."""
LOCK: Seconds = 0.5
"""How long a launcher tries to lock the folder of join requests. Other commands hold the lock while they read it."""

# Reports

SEND_EVERY: Seconds = 0.2
"""The minimum interval between two progress messages of a learner. A table on a terminal is redrawn at
`DRAW_EVERY`."""
DRAW_EVERY: Seconds = 0.25
"""The interval at which the table on a terminal is made and drawn."""
CURVES_EVERY: Seconds = 1.0
"""The minimum interval between two points of a learner's curves: an hour then has at most 3600."""
LOG_EVERY: Seconds = 5.0
"""The minimum interval between two progress lines in a learner's own log."""
SCREEN_EVERY: Seconds = 60.0
"""Without a terminal, progress is printed if there was no line about all learners for this time."""
EPOCH_EVERY: Seconds = 2.0
"""The minimum interval between the lines of two epochs, after the first epochs."""
SCORE_WAIT: Seconds = 5.0
"""How long a validation score waits for the next epoch line before it is printed on a separate line."""
LOOK_EVERY: Seconds = 1.0
"""The interval at which the launcher checks for stalls and writes `status.json`."""
STATUS_FRESH: Seconds = 10.0
"""If a status is older than this, its launcher is not running or is stalled, because it writes a status every
second."""
SHORT_WAIT: Seconds = 1.0
"""Shorter waits are not reported to the launcher, because every averaging round has some."""

# Serving

CLIENT_STALL: Seconds = 30.0
"""How long a client of `starling serve` may send nothing in the middle of an upload or a conversation, or not read its
answer. A telephone in a tunnel is back after seconds."""
ANSWERS_END: Seconds = 5.0
"""How long answers may take to end after `starling serve` is stopped. One turn of the model takes less than 1 s."""
