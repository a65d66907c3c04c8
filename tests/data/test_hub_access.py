"""A hub that does not answer: one line, soon, and all that its libraries said in the traceback."""

from __future__ import annotations

import logging
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import huggingface_hub
import pytest

from tercet import cli
from tercet.data.hub import ASK_SECONDS, fetch_model_file, hub_records, retries_kept
from tercet.data.stream import DataError
from tercet.data.tokenizers import load_tokenizer

RETRY = "Retrying in 1s [Retry 1/5]."
UNREACHABLE = "[Errno -2] Name or service not known\n\nand a paragraph about proxies"


def complain(library: str = "huggingface_hub.utils._http") -> None:
    logging.getLogger(library).warning("%s", RETRY)


@pytest.fixture
def offline(monkeypatch):
    """A hub that cannot be reached and a cache that holds nothing; gives the requests that were made."""
    asked = []

    def info(self, name, **options):
        asked.append((name, options["timeout"]))
        complain()
        raise OSError(UNREACHABLE)

    def download(name, file, *, local_files_only=False):
        if not local_files_only:
            pytest.fail("the library was left to try again and again")
        raise FileNotFoundError("not in the cache")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", info)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", info)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return asked


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--data.tokenizer gpt2", "tokenizer=gpt2 is no file here and could not be fetched from the hub"),
        ("--data.source fineweb-edu", "dataset HuggingFaceFW/fineweb-edu at revision main cannot be reached"),
    ],
)
def test_without_network_a_command_says_one_line_after_one_request(offline, capfd, flags, said):
    assert cli.main(["data", "inspect", *flags.split()]) == 1
    err = capfd.readouterr().err
    assert err.startswith(f"error: {said}")
    assert "([Errno -2] Name or service not known): check the n" in err
    assert err.count("\n") == 1
    assert len(offline) == 1
    assert offline[0][1] == ASK_SECONDS


def test_a_stream_that_cannot_be_opened_says_one_line_too(monkeypatch, capfd):
    import datasets

    def load(*args, **options):
        complain()
        complain("datasets.utils.file_utils")
        raise OSError(UNREACHABLE)

    info = SimpleNamespace(sha="abc", siblings=[SimpleNamespace(rfilename="a/0.parquet")])
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: info)
    monkeypatch.setattr(datasets, "load_dataset", load)
    records = hub_records("someone/texts", "a", "main", "text", seed=0, shuffle=False)
    with pytest.raises(DataError, match=r"broke after record 0 .*\(OSError: \[Errno -2\] [^\n/]*\): check") as caught:
        records.open(0, None)
    assert capfd.readouterr().err == ""
    assert "".join(traceback.format_exception(caught.value)).count(RETRY) == 2


def test_what_the_library_said_is_in_the_traceback(offline, capfd):
    with pytest.raises(DataError) as caught:
        load_tokenizer("gpt2")
    told = "".join(traceback.format_exception(caught.value))
    assert f"huggingface_hub.utils._http: {RETRY}" in told
    assert "and a paragraph about proxies" in told
    assert capfd.readouterr().err == ""


def test_what_went_well_after_a_retry_is_told_afterwards():
    heard = []
    logger = logging.getLogger("huggingface_hub")
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logger.addHandler(handler)
    before = (list(logger.handlers), logger.propagate)
    try:
        with retries_kept():
            complain()
            assert heard == []
        assert heard == [RETRY]
        assert (logger.handlers, logger.propagate) == before
    finally:
        logger.removeHandler(handler)


def test_threads_that_overlap_silence_nobody():
    logger, heard = logging.getLogger("datasets"), []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logger.addHandler(handler)
    before = (list(logger.handlers), logger.propagate)
    first_in, second_in, said, first_out = (threading.Event() for _ in range(4))

    def first():
        with retries_kept():
            logger.warning("first")
            first_in.set()
            second_in.wait(10)
            said.wait(10)
        first_out.set()

    def second():
        first_in.wait(10)
        with retries_kept():
            logger.warning("second")
            second_in.set()
            first_out.wait(10)
            assert heard == ["meanwhile", "first"]

    try:
        with ThreadPoolExecutor(2) as threads:
            done = [threads.submit(first), threads.submit(second)]
            second_in.wait(10)
            logger.warning("meanwhile")  # by a thread that keeps nothing
            said.set()
            for thread in done:
                thread.result(10)
        logger.warning("after")
        assert heard == ["meanwhile", "first", "second", "after"]
        assert (logger.handlers, logger.propagate) == before
    finally:
        logger.removeHandler(handler)


def test_an_earlier_download_counts_where_the_hub_does_not_answer(offline, monkeypatch, tmp_path, caplog):
    kept = str(tmp_path / "snapshots" / "c0ffee" / "tokenizer.json")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda name, file, local_files_only: kept)
    assert fetch_model_file("gpt2", "tokenizer.json") == kept
    assert fetch_model_file("gpt2", "tokenizer.json") == kept
    (told,) = [record.getMessage() for record in caplog.records if record.name.startswith("tercet")]
    assert told == (
        "the hub cannot be reached ([Errno -2] Name or service not known): tokenizer.json of gpt2 is the earlier "
        "download, revision c0ffee"
    )


def answer(status: int) -> Exception:
    error = huggingface_hub.errors.HfHubHTTPError.__new__(huggingface_hub.errors.HfHubHTTPError)
    error.args, error.response = (f"{status} Client Error",), SimpleNamespace(status_code=status)
    return error


@pytest.mark.parametrize(("status", "code"), [(401, 2), (403, 2), (404, 2), (429, 1), (503, 1)])
def test_an_answer_that_is_no_yes_is_an_error_whatever_was_fetched_before(monkeypatch, capfd, status, code):
    def info(self, name, **options):
        raise answer(status)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", info)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", info)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: pytest.fail("an old file was taken"))
    for flags in ("--data.tokenizer gtp2", "--data.source fineweb-edu"):
        assert cli.main(["data", "inspect", *flags.split()]) == code
        assert f"({status} Client Error): check the n" in capfd.readouterr().err


def test_a_connection_that_breaks_below_http_is_no_answer(monkeypatch):
    class TransportError(Exception):
        """As the hub's library knows it: no OSError."""

    class ReadTimeout(TransportError):
        pass

    def info(self, name, **options):
        raise ReadTimeout("timed out")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", info)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, local_files_only: "/kept/tokenizer.json")
    assert fetch_model_file("gpt2", "tokenizer.json") == "/kept/tokenizer.json"


def test_a_hub_that_answers_is_asked_for_the_file_itself(monkeypatch):
    calls = []
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *given, **options: calls.append((given, options)))
    fetch_model_file("gpt2", "tokenizer.json")
    assert calls == [(("gpt2", "tokenizer.json"), {})]
