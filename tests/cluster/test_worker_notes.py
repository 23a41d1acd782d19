"""What workers of parameter servers note for each other on the first server."""

import tensorflow.compat.v1 as tf

import towers
from towers.cluster.member import start_server
from towers.cluster.worker_notes import (FAILED, JOINED, REFUSED, Note, begin_notes, note,
                                         note_failure, noted, notes_of, only_first)
from one_process import addresses


def test_notes_of_a_run_whose_chief_is_started_again():
    """It knows who was there. What failed is old, and in another run all is."""
    workers, ps = addresses(3, 1)
    make = lambda job, rank: towers.Cluster('ps', workers, ps, job, rank)
    config = tf.ConfigProto(device_filters=['/job:ps/task:0'])  # there are no workers
    server = start_server(make('ps', 0), config)
    with tf.Graph().as_default(), tf.Session(server.target, config=config) as session:
        def kinds():
            return [each.kind for _, each in sorted(notes_of(
                session.run(noted(make('worker', 0)))).items())]
        begin_notes(make('worker', 0), session, forget=True)
        assert kinds() == [JOINED, '', '']
        session.run([note(make('worker', 1), JOINED), note(make('worker', 2), REFUSED, 'it is 2')])
        assert notes_of(session.run(noted(make('worker', 0))))[2] == Note(REFUSED, 'it is 2')
        begin_notes(make('worker', 0), session, forget=False)
        assert kinds() == [JOINED, JOINED, '']
        note_failure(make('worker', 2), server.target, config, 'ValueError: of \u00e9')
        assert notes_of(session.run(noted(make('worker', 0))))[2] == Note(
            FAILED, 'ValueError: of \u00e9')
        begin_notes(make('worker', 0), session, forget=True)
        assert kinds() == [JOINED, '', '']


def test_a_note_that_nobody_takes_is_none():
    """The server is gone: what has failed ends without it, at once."""
    workers, ps = addresses(1, 1)
    before = tf.get_default_graph().get_operations()
    note_failure(towers.Cluster('ps', workers, ps), 'grpc://unused:1', tf.ConfigProto(), 'why')
    assert tf.get_default_graph().get_operations() == before


def test_a_session_for_notes_waits_for_no_other_server():
    config = towers.Cluster('ps', ['a:1', 'b:1'], ['c:1', 'd:1'], rank=1).session_config(
        tf.ConfigProto())
    assert list(only_first(config).device_filters) == ['/job:ps/task:0', '/job:worker/task:1']
    assert '/job:ps' in config.device_filters  # of the given one
