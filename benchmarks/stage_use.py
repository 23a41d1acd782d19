"""How busy each stage of a pipeline was, from the trace of a step.

A device is busy while at least one kernel runs on it; what sends and receives tensors only waits.
Tracing costs some microseconds a kernel: hence few large kernels, and no clock but the trace's own.
"""

import re

_TRANSFERS = re.compile(r' = (_Send|_Recv|_HostSend|_HostRecv)\(')


def traced_step(metadata):
    """What each device did in a step.

    Args:
      metadata: `RunMetadata` of a FULL_TRACE step of towers of several CPUs.

    Returns:
      dict: `milliseconds`, from the first kernel's start to the last one's end; `use`, {device: the
      share of them in which a kernel ran on it}; `rows`, `[device, 'forward' or 'backward', spans]`
      with spans as lists of `[begin, end]` in milliseconds from the step's first kernel.

    Raises:
      ValueError: the trace has no kernels on two devices.
    """
    kernels = []
    for device in metadata.step_stats.dev_stats:
        name = re.search(r'device:(CPU:\d+)$', device.device)
        for node in device.node_stats if name else ():
            if not _TRANSFERS.search(node.timeline_label):
                begin = node.all_start_micros + node.op_start_rel_micros
                end = node.all_start_micros + node.op_end_rel_micros
                kernels.append((name.group(1), _pass_of(node.node_name), begin, end))
    devices = sorted({kernel[0] for kernel in kernels})
    if len(devices) < 2:
        raise ValueError('%d kernels on %s: expected some on two devices' % (
            len(kernels), ' and '.join(devices) or 'none'))
    first, last = min(each[2] for each in kernels), max(each[3] for each in kernels)
    rows = [[device, what, merged([((begin - first) / 1e3, (end - first) / 1e3)
                                   for on, of, begin, end in kernels
                                   if (on, of) == (device, what)])]
            for device in devices for what in ('forward', 'backward')]
    use = {device: sum(end - begin for begin, end in merged(
        [each[2:] for each in kernels if each[0] == device])) / float(last - first)
           for device in devices}
    return {'milliseconds': (last - first) / 1e3, 'use': use, 'rows': rows}


def merged(spans):
    """`[begin, end]` lists of the time that spans cover together, in order and apart."""
    found = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([begin, end])
    return found


def predicted_use(num_stages, micro_batches):
    """The share of a step in which each of K equal stages works: M / (M + K - 1)."""
    return micro_batches / float(micro_batches + num_stages - 1)


def quickest(steps, count):
    """Those of `traced_step`'s that took the least, the quickest first."""
    return sorted(steps, key=lambda step: step['milliseconds'])[:count]


def _pass_of(name):
    return 'backward' if '/gradients/' in name else 'forward'
