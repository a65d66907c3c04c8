"""An unreachable hub: one line of error, quickly, without the libraries' log."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import huggingface_hub
import pytest

from tercet import cli
from tercet.data.hub import REQUEST_SECONDS, fetch_model_file

RETRY = "Retrying in 1s [Retry 1/5]."
UNREACHABLE = "[Errno -2] Name or service not known\n\nand a paragraph about proxies"


def complain(library: str = "huggingface_hub.utils._http") -> None:
    logging.getLogger(library).warning("%s", RETRY)


@pytest.fixture
def offline(monkeypatch):
    """An unreachable hub and an empty cache; returns the requests made."""
    requests = []

    def info(self, name, **options):
        requests.append((name, options["timeout"]))
        complain()
        raise OSError(UNREACHABLE)

    def download(name, file, *, local_files_only=False):
        if not local_files_only:
            pytest.fail("the library retries on its own")
        raise FileNotFoundError("not in the cache")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", info)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", info)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return requests


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--data.tokenizer gpt2", "tokenizer=gpt2 is not a local file and cannot be fetched from the hub"),
        ("--data.source fineweb-edu", "dataset HuggingFaceFW/fineweb-edu at revision main cannot be reached"),
    ],
)
def test_without_network_a_command_prints_one_line_after_one_request(offline, capfd, flags, message):
    assert cli.main(["data", "inspect", *flags.split()]) == 1
    err = capfd.readouterr().err
    assert err.startswith(f"error: {message}")
    assert "([Errno -2] Name or service not known): check the n" in err
    assert err.count("\n") == 1
    assert len(offline) == 1
    assert offline[0][1] == REQUEST_SECONDS


def test_an_unreachable_hub_falls_back_to_the_cached_file(offline, monkeypatch, tmp_path, caplog):
    kept = str(tmp_path / "snapshots" / "c0ffee" / "tokenizer.json")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda name, file, local_files_only: kept)
    assert fetch_model_file("gpt2", "tokenizer.json") == kept
    assert fetch_model_file("gpt2", "tokenizer.json") == kept
    (warning,) = [record.getMessage() for record in caplog.records if record.name.startswith("tercet")]
    assert "the hub cannot be reached ([Errno -2] Name or service not known)" in warning
    assert "cached tokenizer.json of gpt2, revision c0ffee" in warning


def http_error(status: int) -> Exception:
    error = huggingface_hub.errors.HfHubHTTPError.__new__(huggingface_hub.errors.HfHubHTTPError)
    error.args, error.response = (f"{status} Client Error",), SimpleNamespace(status_code=status)
    return error


@pytest.mark.parametrize(("status", "code"), [(401, 2), (403, 2), (404, 2), (429, 1), (503, 1)])
def test_an_http_error_never_falls_back_to_the_cache(monkeypatch, capfd, status, code):
    def info(self, name, **options):
        raise http_error(status)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", info)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", info)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: pytest.fail("used the cached file"))
    for flags in ("--data.tokenizer gtp2", "--data.source fineweb-edu"):
        assert cli.main(["data", "inspect", *flags.split()]) == code
        assert f"({status} Client Error): check the n" in capfd.readouterr().err


def test_a_transport_error_counts_as_unreachable(monkeypatch):
    class TransportError(Exception):
        """As in the hub library: not an OSError."""

    class ReadTimeout(TransportError):
        pass

    def info(self, name, **options):
        raise ReadTimeout("timed out")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", info)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, local_files_only: "/kept/tokenizer.json")
    assert fetch_model_file("gpt2", "tokenizer.json") == "/kept/tokenizer.json"
