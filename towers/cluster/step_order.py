"""The order in which a program steps the builds of a graph, such as the two of a GAN.

All workers run the same train ops in the same order. So a worker that leaves its loop knows which
step the others make next: what came after its last steps, when it made the same ones before.
"""

import collections

_KEPT = 512  # steps that are remembered; a round of a program is shorter


class StepOrder:
    """Remembers the steps of a session."""

    def __init__(self):
        self._made = collections.deque(maxlen=_KEPT)

    def note(self, build):
        """Call this for each step; `build` is any object that stands for the build."""
        self._made.append(build)

    def next(self, default):
        """The build that is stepped next.

        Where all steps repeat, it is the one in the same place of the round. Else it is the one
        that came after the longest run of steps that are the same as the last ones, the latest of
        these: a program may warm one build up first. Before the second round it is the first build
        that was stepped, or the default before the first step.
        """
        made = list(self._made)
        for period in range(1, len(made)):
            if made[period:] == made[:-period]:
                return made[-period]
        longest, found = 0, made[0] if made else default
        for end in range(1, len(made)):
            length = 0
            while length < end and made[end - 1 - length] == made[-1 - length]:
                length += 1
            if length and length >= longest:
                longest, found = length, made[end]
        return found
