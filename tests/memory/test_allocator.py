"""TensorFlow's best-fit allocator, chunk by chunk."""

from towers.memory.allocator import BestFitAllocator, handed_out
from towers.memory.simulation import Run

KB, MB = 1 << 10, 1 << 20


def test_requests_are_rounded_up_to_256_bytes():
    pool = BestFitAllocator()
    pool.allocate(1)
    pool.allocate(257)
    assert (pool.in_use, pool.reserved) == (256 + 512, MB)


def test_a_chunk_is_cut_only_if_it_is_twice_as_large():
    pool = BestFitAllocator()
    whole = pool.allocate(600 * KB)  # of a region of 1 MB, which is less than twice as large
    assert whole.size == MB and pool.in_use == MB
    pool.free(whole)
    half = pool.allocate(512 * KB)
    assert half.size == 512 * KB and pool.in_use == 512 * KB


def test_the_smallest_chunk_that_is_large_enough_is_taken_and_neighbours_are_joined():
    pool = BestFitAllocator()
    chunks = [pool.allocate(size * KB) for size in (100, 30, 200, 30, 50, 30)]
    for number in (0, 2, 4):
        pool.free(chunks[number])
    assert pool.allocate(60 * KB).size == 100 * KB  # not that of 50 and not that of 200
    pool.free(chunks[3])  # between the free ones of 200 and 50
    assert pool.allocate(140 * KB).size == 140 * KB  # of 280, cut


def test_regions_double():
    pool = BestFitAllocator()
    pool.allocate(5 * MB)
    assert pool.reserved == 8 * MB
    pool.allocate(7 * MB)
    assert pool.reserved == 16 * MB


def test_what_128_mb_would_be_lost_of_is_cut():
    pool = BestFitAllocator()
    pool.free(pool.allocate(512 * MB))
    assert pool.allocate(300 * MB).size == 300 * MB


def test_variables_are_where_the_step_before_has_put_them():
    run, node = Run(), object()
    first = run.allocate(MB, '/device:CPU:0', node, what='variable')
    first.variable = node
    second = run.allocate(MB, '/device:CPU:0', node, what='update')
    second.variable = node
    run.free(first)
    assert handed_out(run, lambda device: 'cpu', [('/device:CPU:0', 2 * MB)]) == {'cpu': 4 * MB}
    assert handed_out(run, lambda device: None) == {}
