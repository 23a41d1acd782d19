"""The list of what a run leaves out: in a file of its folder, taken up by a run that resumes."""

import json

import pytest

import datasets
from datasets.bad_examples import Bad, Change, Skipped
from towers.errors import LogFileError


def still_bad(bad):
    """What has become of an example: nothing."""
    return bad


def list_of_a_run(folder, *positions):
    skipped = Skipped(9)
    skipped.resume(str(folder), 0, still_bad)
    skipped.add(Bad('test', 4, -1, 'test example 4 is empty'))
    skipped.add(Bad('train', None, -1, 'a file is missing'))
    for position in positions:
        skipped.add(Bad('train', position, position, 'example %d is empty' % position))
    return folder / 'skipped_examples.jsonl'


def test_a_run_takes_up_what_it_knew_at_its_place(tmp_path):
    list_of_a_run(tmp_path, 10, 20, 30)
    # What is at the place at which it goes on has not been met yet.
    for place, known in ((0, []), (10, []), (11, [10]), (20, [10]), (21, [10, 20]),
                         (99, [10, 20, 30])):
        again, path = Skipped(9), tmp_path / 'skipped_examples.jsonl'
        before = path.read_text()
        assert again.resume(str(tmp_path), place, still_bad) == []
        path.write_text(before)
        assert again.since('train') == {number: number for number in known}
        # Whole files and the test set are looked for anew.
        assert len(again.examples) == len(known)


def test_what_a_trial_leaves_out_is_forgotten(tmp_path):
    """How far it comes depends on the machine, and what a run leaves out may not."""
    path = list_of_a_run(tmp_path, 10)
    skipped = Skipped(1)
    skipped.resume(str(tmp_path), 99, still_bad)
    kept, before = list(skipped.examples), path.read_text()
    with pytest.raises(KeyError), skipped.forgetting():
        for number in range(5):  # more than a run may leave out
            skipped.add(Bad('train', number, -1, 'example %d is empty' % number))
        assert skipped.numbers('train') == {10, 0, 1, 2, 3, 4}
        raise KeyError
    assert (skipped.examples, path.read_text()) == (kept, before)
    with pytest.raises(datasets.BadExampleError):
        skipped.add(Bad('train', 0, 0, 'example 0 is empty'))
    none = Skipped()
    with pytest.raises(datasets.BadExampleError), none.forgetting():
        none.add(Bad('train', 0, 0, 'example 0 is empty'))


def test_what_a_run_left_out_and_is_good_now_goes_from_its_list(tmp_path):
    path = list_of_a_run(tmp_path, 10, 20, 30)
    again, asked = Skipped(9), []

    def look_again(bad):
        asked.append((bad.number, sorted(again.numbers('train'))))
        return Change(True, '%d is good now' % bad.number) if bad.number != 20 else bad
    assert [change.text for change in again.resume(str(tmp_path), 99, look_again)] == [
        '10 is good now', '30 is good now']
    assert asked == [(10, []), (20, []), (30, [20])]
    assert again.numbers('train') == {20}
    assert [json.loads(line)['number'] for line in path.read_text().splitlines()] == [20]


def texts_of(path):
    return [json.loads(line)['text'] for line in path.read_text().splitlines()]


def test_the_list_of_a_run_has_the_files_that_this_start_found(tmp_path):
    path = tmp_path / 'run' / 'skipped_examples.jsonl'

    def start(*files):
        skipped = Skipped(9)
        for file in files:  # before there is a folder, as when a data set is opened
            skipped.add(Bad('train', None, -1, '%s is missing' % file))
        assert skipped.resume(str(tmp_path / 'run'), 5, still_bad) == []
        return skipped
    start()
    assert not path.exists()  # nothing to say
    start('a', 'b').add(Bad('test', 3, -1, '3 is empty'))
    assert texts_of(path) == ['a is missing', 'b is missing', '3 is empty']
    start('b')
    assert texts_of(path) == ['b is missing']
    start()
    assert path.read_text() == ''


def test_a_list_that_cannot_be_written(tmp_path):
    (tmp_path / 'file').write_text('')
    skipped = Skipped(9)
    skipped.add(Bad('train', None, -1, 'a is missing'))
    with pytest.raises(LogFileError, match='The directory .*file/run cannot be made: Not a dir'):
        skipped.resume(str(tmp_path / 'file' / 'run'), 0, still_bad)
    (tmp_path / 'skipped_examples.jsonl').symlink_to('file')
    with pytest.raises(LogFileError, match='skipped_examples.jsonl is a symbolic link, and a fi'):
        skipped.resume(str(tmp_path), 0, still_bad)


@pytest.mark.parametrize('most, text', [
    (0, r'example 10 is empty. The run in \S+ left it out, and may leave out none now: give '
        r'--skip_bad again, as in --skip_bad=10, or mend it'),
    (2, 'example 30 is empty. 2 were left out already, and --skip_bad=2 allows no more')])
def test_a_run_that_resumes_may_leave_out_as_many_as_it_is_told(tmp_path, most, text):
    path = list_of_a_run(tmp_path, 10, 20, 30)
    before = path.read_text()
    with pytest.raises(datasets.BadExampleError, match=text):
        Skipped(most).resume(str(tmp_path), 99, still_bad)
    assert path.read_text() == before  # a run that is told better goes on from it


@pytest.mark.parametrize('content', [
    '{"split": "train", "num', '[1]', '{"a": 1}', '\0\0',
    '{"split": "train", "number": 1, "position": null, "text": ""}'])
def test_a_damaged_list_of_a_run_is_named(tmp_path, content):
    (tmp_path / 'skipped_examples.jsonl').write_text(content)
    with pytest.raises(datasets.DatasetError, match='skipped_examples.jsonl.* cannot be read: '
                       '.* Remove it'):
        Skipped(3).resume(str(tmp_path), 7, still_bad)
