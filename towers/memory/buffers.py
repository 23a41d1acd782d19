"""The pieces of memory that a simulated step uses, and the worst moment of each device.

`simulation` says when each piece is allocated and released. Its test is
`tests/memory/test_simulation.py`.
"""

import collections
import typing

from towers.memory.node import Node, Output

# The uses of a `Buffer`.
VARIABLE = 'variable'
OUTPUT = 'output'
SCRATCH = 'scratch'
TRANSFER = 'transfer'  # a copy of another device's tensor
UPDATE = 'update'  # a variable's new memory while its old memory is still being read

# The uses of a buffer that begins with one reference: the reference of the operation that works in
# the buffer (`SCRATCH`), or of the variable that the buffer holds.
_HELD_FROM_THE_START = (SCRATCH, VARIABLE, UPDATE)


class Owner(typing.NamedTuple):
    """The operation whose result a buffer holds from an event on. A buffer may hold several results
    one after the other, as kernels write over inputs."""
    event: int  # see `Memory`
    node: Node
    output: int  # index of the node's output


class Peak(typing.NamedTuple):
    """The worst moment of a device."""
    bytes: int  # in use at that moment
    event: int  # the allocation at that moment
    node: typing.Optional[Node]  # the operation that began at that moment


NO_PEAK = Peak(bytes=0, event=0, node=None)


class Buffer:
    """A piece of memory.

    Attributes:
      size: its bytes.
      device: where it is.
      what: its use: `VARIABLE`, `OUTPUT`, `SCRATCH`, `TRANSFER` or `UPDATE`.
      variable: the `Node` of the variable that it holds or held; None for anything else.
      since, until: the events that allocate and free it; `until` is None until it is freed.
      references: how many operations, or variables, still need it. An output begins with none,
        since the operations that take it are counted when it has been computed.
    """
    __slots__ = ('size', 'device', 'what', 'variable', 'since', 'until', 'references', '_owners')

    def __init__(self, size: int, device: str, what: str, variable: typing.Optional[Node],
                 owner: Owner):
        """The arguments are the attributes of these names; `owner` is the first one."""
        self.size = size
        self.device = device
        self.what = what
        self.variable = variable
        self.since = owner.event
        self.until: typing.Optional[int] = None
        self.references = 0
        if what in _HELD_FROM_THE_START:
            self.references = 1
        self._owners = [owner]

    def write_over(self, owner: Owner) -> None:
        """Notes that the buffer holds the output of another node from now on."""
        self._owners.append(owner)

    def held_output(self, event: int) -> Output:
        """The output that the buffer holds at an event. The buffer of a variable holds the output
        of the variable's own node, whatever is written into it."""
        if self.variable is not None:
            return Output(self.variable, 0)
        owners_so_far = [owner for owner in self._owners if owner.event <= event]
        last_owner = owners_so_far[-1]
        return Output(last_owner.node, last_owner.output)

    def is_there(self, event: int) -> bool:
        """Whether the buffer is in memory right after an event."""
        is_freed = self.until is not None and self.until <= event
        return self.since <= event and not is_freed


class Memory:
    """The memory of all devices. Each allocation and each release is an event, counted from 1."""

    def __init__(self) -> None:
        """Begins with nothing in use."""
        self.buffers: typing.List[Buffer] = []
        # {device: its peak}; under None the peak of all devices together
        self.peaks: typing.Dict[typing.Optional[str], Peak] = {}
        self.last_event = 0
        # {device: bytes}; under None the bytes of all devices together
        self._in_use: typing.Counter[typing.Optional[str]] = collections.Counter()

    def allocate(self, size: int, device: str, node: Node, output: int = 0,
                 what: str = OUTPUT) -> typing.Optional[Buffer]:
        """Allocates a `Buffer`, and returns it; None for no bytes.

        Args:
          size: its bytes.
          device: where it is.
          node: the operation that needs it, and that begins at this moment.
          output: the index of the operation's output that the buffer holds.
          what: the buffer's use.
        """
        if not size:
            return None
        owner = self._next_owner(node, output)
        return self._add(Buffer(size, device, what, variable=None, owner=owner), node)

    def allocate_variable(self, variable: Node, size: int, node: Node,
                          what: str = VARIABLE) -> Buffer:
        """Allocates a `Buffer` for a variable, and returns it. The buffer of a variable of unknown
        size has 0 bytes. The reads of such a variable are counted as the reads of any other.

        Args:
          variable: the operation of the variable.
          size: bytes of the variable.
          node: the operation that needs the buffer, and that begins at this moment: the variable's
            own operation, or an operation that updates the variable.
          what: the buffer's use.
        """
        owner = self._next_owner(node, 0)
        return self._add(Buffer(size, variable.device, what, variable, owner), node)

    def _next_owner(self, node: Node, output: int) -> Owner:
        """Counts an event, the allocation of a buffer; returns the owner of that buffer."""
        self.last_event += 1
        return Owner(self.last_event, node, output)

    def _add(self, buffer: Buffer, node: Node) -> Buffer:
        """Counts the bytes of a buffer that is allocated for an operation; returns the buffer."""
        self.buffers.append(buffer)
        for key in (buffer.device, None):  # None for all devices together
            self._in_use[key] += buffer.size
            if self._in_use[key] > self.peaks.get(key, NO_PEAK).bytes:
                self.peaks[key] = Peak(self._in_use[key], buffer.since, node)
        return buffer

    def release(self, buffer: typing.Optional[Buffer]) -> None:
        """Takes one reference away from a buffer, and frees it if that was the last; does nothing
        for None."""
        if buffer is None:
            return
        buffer.references -= 1
        if not buffer.references:
            self.last_event += 1
            buffer.until = self.last_event
            self._in_use[buffer.device] -= buffer.size
            self._in_use[None] -= buffer.size
