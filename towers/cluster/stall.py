"""Says who does not answer when a step on parameter servers takes long."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from towers.cluster.ports import answers
from towers.cluster.wait_notice import AGAIN, FIRST, REFUSED_WAITS
from towers.cluster.worker_notes import FAILED, REFUSED

_PAUSE = 1.  # seconds from one look to the next, at most
_ALL_ANSWER = 'all workers and servers answer, so one of them is slow'
_MOST_LOOKS = 16  # at addresses at a time: that of a machine that is off takes seconds


class StallWatch:
    """A thread that says which process does not answer in a step that takes too long, and again.

    A synchronous step waits for every worker, without a message from TensorFlow. A worker or server
    that was killed is waited for: started again, it joins the run. A worker that has ended in good
    order does not come back, so that the step never ends; nor does the first step, if a worker has
    not come in time or was refused. And once this process has been told to stop, it waits no
    longer. That a worker has ended by an error is said earlier than that one does not answer: it
    is known, and nothing but a start of it ends the wait.

    Between two steps it waits for the servers alone: in a checkpoint, or for another session.
    """

    def __init__(self, cluster, seconds, say, ended=None, on_ended=None, told_to_stop=bool,
                 on_told=None, notes=None, start_timeout=None, on_missing=None):
        """
        Args:
          cluster: `Cluster` with parameter servers.
          seconds: how long a step may take before a line is written.
          say: called with the lines, in the thread.
          ended: called for a list of the other workers that have ended; None where no step waits
            for other workers.
          on_ended: called with that list, once, when a step waits for one of them.
          told_to_stop: called for whether a signal has told this process to stop.
          on_told: called, once, with words that say for whom a step of such a process waits.
          notes: called, after `ended`, for a dict from ranks to `Note`s; or None where nothing is
            known. None as `ended` is.
          start_timeout: seconds from now on in which the workers have to come.
          on_missing: called with words, once, when the first step waits for one that has not.
        """
        self._cluster, self._seconds, self._say = cluster, seconds, say
        self._ended, self._on_ended = ended, on_ended
        self._told_to_stop, self._on_told = told_to_stop, on_told
        self._notes, self._on_missing = notes, on_missing
        self._start_timeout, self._begun = start_timeout, time.monotonic()
        self._at = (self._begun, False)  # when a step or a pause began, and whether it is a step
        self._all_came = self._has_done_step = False
        self._refused = {}  # rank -> the reason that has been said
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name='towers-stall')
        self._thread.start()

    def step_begins(self):
        """Notes that a step begins now."""
        self._at = (time.monotonic(), True)

    def step_ends(self):
        """Notes that a step has been done."""
        self._has_done_step = True
        self._at = (time.monotonic(), False)

    def session_ends(self):
        """Notes that no step comes for now."""
        self._at = None

    def close(self):
        """Ends the thread."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self):
        spoken = spoken_at = seen = None
        failed_at = time.monotonic()  # when the notes were last looked at for errors
        while not self._stop.wait(min(self._seconds / 5., _PAUSE)):
            at = self._at
            if at is None:
                continue
            since, in_step = at
            took = time.monotonic() - since
            takes_long = took > self._seconds
            looks_for_missing = self._notes is not None and not self._all_came
            looks_for_failed = (self._notes is not None and in_step and took > self._early()
                                and time.monotonic() - failed_at > self._early())
            if not takes_long and not looks_for_missing and not looks_for_failed:
                continue
            asks = in_step or looks_for_missing
            ended = self._ended() if asks and self._ended is not None else []
            notes = self._notes() if asks and self._notes is not None else None
            missing = self._missing(notes) if looks_for_missing and notes else []
            if looks_for_failed and notes is not None:
                if self._stops([rank for rank, note in notes.items()
                                if note.kind == FAILED and rank != self._cluster.rank]):
                    takes_long = True
                else:
                    failed_at = time.monotonic()
            waits = in_step and self._stops(missing) and took > min(FIRST, self._start_timeout / 2.)
            in_vain = in_step and takes_long and self._stops(ended)
            is_late = waits and time.monotonic() - self._begun > self._start_timeout
            told = None
            if takes_long and not in_vain and not is_late and self._told_to_stop():
                told = self._who(in_step, notes)
            if in_vain or is_late or told:
                # A process that was frozen itself has one more look to find its step done.
                if at == seen and at == self._at:
                    if in_vain:
                        self._on_ended(ended)
                    elif is_late:
                        self._on_missing(self._why_missing(missing, notes))
                    else:
                        self._on_told(told)
                    return
                seen = at
                continue
            line = None
            if waits:
                line = 'for %s, start_timeout is %.3g s' % (', '.join(
                    self._cluster.who(rank) + REFUSED_WAITS * (notes[rank].kind == REFUSED)
                    for rank in missing), self._start_timeout)
            elif takes_long and not self._stops(missing):
                line = self._stall(in_step, notes,
                                   self._early() if looks_for_failed else self._seconds)
            now = time.monotonic()
            is_new = spoken is None or since > spoken_at or now - spoken_at >= AGAIN
            # What becomes known later is said at once; that all answer again is no news.
            if line and at == self._at and (
                    is_new or line != spoken and not line.endswith(_ALL_ANSWER)):
                spoken, spoken_at = line, now
                self._say('waiting        ' + line)

    def _early(self):
        """Seconds into a step after which to look whether a worker has ended by an error."""
        return min(FIRST, self._seconds)

    def _stops(self, ranks):
        """Whether no step can be done without these workers."""
        return 0 in ranks or len(ranks) > self._cluster.backup_workers

    def _missing(self, notes):
        """The other workers that have not joined; the chief says which of them were refused."""
        found = []
        for rank, note in sorted(notes.items()):
            if rank == self._cluster.rank or note.kind not in ('', REFUSED):
                continue
            found.append(rank)
            if (self._cluster.is_chief and note.kind == REFUSED
                    and self._refused.get(rank) != note.why):
                self._refused[rank] = note.why
                self._say('refused        worker %d: %s' % (rank, note.why))
        # Backup workers may never come.
        self._all_came = not found or self._has_done_step and not self._stops(found)
        return found

    def _why_missing(self, missing, notes):
        silent = [rank for rank in missing if notes[rank].kind != REFUSED]
        parts = ['worker %d was refused: %s' % (rank, notes[rank].why.rstrip('.'))
                 for rank in missing if rank not in silent]
        if silent:
            parts.append('there is no word of %s within start_timeout: start %s, or give a longer '
                         'one' % (self._named(silent), 'it' if len(silent) == 1 else 'them'))
        return '. '.join(parts)

    def _named(self, ranks):
        return ', '.join(self._cluster.who(rank) for rank in ranks)

    def _stall(self, in_step, notes, seconds):
        """The line about a step, or pause, that takes long; None where nothing is wrong."""
        who = self._who(in_step, notes, advice=True)
        return who and '%s more than %g seconds; %s' % (
            'the step takes' if in_step else 'no step for', seconds, who)

    def _who(self, in_step, notes, advice=False):
        """For whom this process waits, in words; None in a pause if all servers answer.

        Args:
          in_step, notes: as for `_stall`.
          advice: whether to say what to do, too.
        """
        notes, cluster, parts = notes or {}, self._cluster, []
        for rank, note in sorted(notes.items()):
            if rank == cluster.rank:
                continue
            if note.kind == REFUSED:
                parts.append('%s was refused: %s%s' % (
                    cluster.who(rank), note.why.rstrip('.'),
                    '. It joins when it is started as worker 0 is' * advice))
            elif note.kind == FAILED:
                parts.append('%s has ended: %s%s' % (
                    cluster.who(rank), note.why.rstrip('.'),
                    '. When that is mended, start it again, and the run goes on' * advice))
        others = [('worker', rank) for rank in range(cluster.num_workers if in_step else 0)
                  if rank != cluster.rank
                  and (rank not in notes or notes[rank].kind not in (REFUSED, FAILED))]
        others += [('ps', rank) for rank in range(len(cluster.ps))]
        addresses = {'worker': cluster.workers, 'ps': cluster.ps}
        found = dict(zip(others, _all_answers([addresses[job][rank] for job, rank in others])))
        silent, mute = [[cluster.who(rank, job) for job, rank in others
                         if found[job, rank] is answer] for answer in (False, None)]
        if silent:
            parts.append('%s %s not answer%s' % (
                ', '.join(silent), 'does' if len(silent) == 1 else 'do',
                ': start %s again, and the run goes on' % (
                    'it' if len(silent) == 1 else 'them') if advice else ''))
        if mute:
            parts.append('%s %s' % (', '.join(mute), (
                'takes connections and says nothing: its process is frozen' if len(mute) == 1 else
                'take connections and say nothing: their processes are frozen')))
        return '; '.join(parts) or (_ALL_ANSWER if in_step else None)


def _all_answers(addresses):
    """What `answers` gives for each address, a list; those that do not answer take no turns."""
    if not addresses:
        return []
    with ThreadPoolExecutor(min(len(addresses), _MOST_LOOKS)) as pool:
        return list(pool.map(answers, addresses))


def silent_servers(cluster):
    """The parameter servers that do not answer, in words; all, if each does."""
    everyone = range(len(cluster.ps))
    silent = [rank for rank, answer in enumerate(_all_answers(cluster.ps)) if answer is not True]
    return ', '.join(cluster.who(rank, 'ps') for rank in silent or everyone)
