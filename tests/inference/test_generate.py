"""Generation gives the same tokens with and without cache, in any batch; bad input raises one-line errors."""

from __future__ import annotations

import io

import pytest
import torch

import tercet
from inference.models import AS_M7C, greedy_without_cache, language_model
from tercet.cli import main
from tercet.errors import TercetError
from tercet.inference.arguments import PromptError
from tercet.inference.decoder import CachedDecoder
from tercet.inference.generate import Timing, stream

KINDS = {
    "nsa": {},
    "dense": {"model__attention": "dense"},
    "window and nsa": {"model__attention": "window,nsa", "model__qk_norm": True},
    "as m7c": AS_M7C,
    "both, shared, normed, mean, biased": {
        "model__attention": ("dense", "nsa"),
        "model__shared_kv": True,
        "model__qk_norm": True,
        "model__compression": "mean",
        "model__attention_bias": True,
        "model__heads": 4,
        "model__kv_heads": 2,
    },
}
PROMPTS = [[5, 9, 200], list(range(1, 60)), [(37 * i * i + 11) % 251 for i in range(17)], list(range(91, 40, -1))]


@pytest.fixture(params=[pytest.param(k, marks=pytest.mark.slow if k == "dense" else []) for k in KINDS], scope="module")
def model(request):
    return language_model(**KINDS[request.param])


@pytest.fixture(scope="module")
def expected(model):
    """Each prompt alone, without a cache."""
    return [greedy_without_cache(model, prompt, 10) for prompt in PROMPTS]


def greedy(model, prompts, **options):
    options = {"max_new_tokens": 10, "temperature": 0, "eos_id": -1, **options}
    made = tercet.generate(model, prompts, **options)
    return [g.tokens for g in made] if isinstance(made, list) else made.tokens


def test_tokens_are_the_same_with_and_without_cache(model, expected):
    assert [greedy(model, prompt) for prompt in PROMPTS] == expected


@pytest.mark.parametrize("chunk", [pytest.param(1, marks=pytest.mark.slow), 7, 50])
def test_tokens_are_the_same_for_any_chunking_of_the_prompt(model, expected, chunk):
    assert greedy(model, PROMPTS, prefill_chunk=chunk) == expected


def test_tokens_are_the_same_in_any_batch(model, expected):
    assert greedy(model, PROMPTS) == expected
    assert greedy(model, PROMPTS[::-1]) == expected[::-1]
    assert greedy(model, [PROMPTS[1]] * 3) == [expected[1]] * 3


def test_a_row_that_ends_early_leaves_the_others_as_they_are(model, expected):
    end = expected[2][5]
    cut = [tokens[: tokens.index(end)] if end in tokens else tokens for tokens in expected]
    assert greedy(model, PROMPTS, eos_id=end) == cut
    assert len({len(tokens) for tokens in cut}) > 1


def test_a_seed_gives_the_same_text_alone_and_in_a_batch():
    model = language_model()
    options = {"temperature": 1.2, "top_k": 40, "top_p": 0.95, "repetition_penalty": 1.1, "eos_id": -1}
    together = tercet.generate(model, PROMPTS, max_new_tokens=12, seed=3, **options)
    alone = [tercet.generate(model, p, max_new_tokens=12, seed=3 + i, **options) for i, p in enumerate(PROMPTS)]
    assert [g.tokens for g in together] == [g.tokens for g in alone]
    other = tercet.generate(model, PROMPTS, max_new_tokens=12, seed=4, **options)
    assert [g.tokens for g in other] != [g.tokens for g in together]


def test_the_callers_random_numbers_are_not_touched():
    model = language_model()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    tercet.generate(model, "abc", max_new_tokens=3)
    assert torch.equal(torch.get_rng_state(), before)


def test_pieces_add_up_to_the_whole():
    model = language_model()
    whole = tercet.generate(model, ["ab", "abcdef"], max_new_tokens=20, temperature=0)
    pieces = list(stream(model, ["ab", "abcdef"], max_new_tokens=20, temperature=0))
    for row, generated in enumerate(whole):
        own = [p for p in pieces if p.row == row]
        assert "".join(p.text for p in own) == generated.text
        assert [p.token for p in own if p.token is not None] == generated.tokens
        assert [p.finished for p in own if p.finished] == [generated.finished]


def test_a_stop_string_ends_the_text_before_it():
    model = language_model()
    whole = tercet.generate(model, "abc", max_new_tokens=24, temperature=0)
    stop = whole.text[6:9]
    cut = tercet.generate(model, "abc", max_new_tokens=24, temperature=0, stop=(stop,))
    assert cut.finished == "stop"
    assert cut.text == whole.text[: whole.text.index(stop)]


def test_time_and_keys_are_counted():
    model = language_model()
    timing = Timing()
    tercet.generate(model, [PROMPTS[1]], max_new_tokens=5, temperature=0, timing=timing, eos_id=-1)
    config = model.config.nsa
    t = len(PROMPTS[1]) + 3  # the position of the last token read
    assert t // config.select_block + 1 > config.select_count
    compressed = config.num_compressed(t + 1)
    selected = (config.select_count - 1) * config.select_block + t % config.select_block + 1
    assert timing.keys_read == model.config.layers * (compressed + selected + config.window)
    assert (timing.prompt_tokens, timing.new_tokens) == (len(PROMPTS[1]), 4)
    assert timing.tokens_per_second > 0


def test_padding_rows_of_the_vocabulary_are_never_sampled():
    model = language_model(model__vocab_size=264)
    with torch.no_grad():
        model.head.weight[256:] *= 50
    made = tercet.generate(model, "abc", max_new_tokens=20, temperature=5.0)
    assert max(made.tokens) < 256


@pytest.mark.parametrize(
    ("prompts", "options", "said"),
    [
        ("", {}, "the prompt is empty: give at least one token"),
        (["a", ""], {}, "prompt 1 is empty"),
        ([], {}, "no prompt given"),
        ([[1, 2, 300]], {}, "token 300 at position 2 is outside the vocabulary, 0 to 255"),
        ([[1, -1]], {}, "token -1 at position 1"),
        ("a\0b", {}, "has a zero byte at 1"),
        ("a\udcffb", {}, "not valid UTF-8: character 1 ('\\udcff')"),
        ([{"role": "user"}], {}, "the prompt is a conversation, but tokenizer byte has no chat template"),
        ([{"role": "user"}, 1.5], {}, "the prompt is a conversation"),
        ("x" * 120, {}, "has 120 tokens; with max_new_tokens=16 that makes 136, over the context of 128"),
        ("abc", {"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
        ("abc", {"temperature": -1}, "temperature=-1 must be at least 0"),
        ("abc", {"top_p": 0}, "top_p=0 must be above 0"),
        ("abc", {"prefill_chunk": 0}, "prefill_chunk=0 must be at least 1"),
    ],
)
def test_invalid_prompts_and_options_raise_one_line(prompts, options, said):
    with pytest.raises(TercetError) as caught:
        tercet.generate(language_model(), prompts, **{"max_new_tokens": 16, **options})
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder that loads as a small model."""
    for name in ("config.toml", "model.safetensors"):
        (tmp_path / name).touch()
    monkeypatch.setattr("tercet.inference.load.load_model", lambda *_, **__: language_model())
    return str(tmp_path)


def test_the_prompt_is_read_from_standard_input(folder, monkeypatch, capsys):
    def answered(*words, stdin=""):
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        assert main(["generate", folder, "--max-new-tokens", "5", *words]) == 0
        return capsys.readouterr()

    piped = answered(stdin="import os\n").out  # as echo writes it
    assert piped.startswith("import os")
    assert piped == answered("--prompt", "import os").out == answered("--prompt-file", "-", stdin="import os").out


def test_on_a_terminal_each_line_is_answered(folder, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", Terminal())
    lines = iter(["abc", "", "x" * 200, "def"])

    def read(_):
        line = next(lines, None)
        if line is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", read)
    assert main(["generate", folder, "--max-new-tokens", "5"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("abc")
    assert "\ndef" in out
    assert err.count("error: ") == 1  # the prompt that is too long; the loop goes on
    assert err.count("tokens/s") == 2
    assert "--prompt TEXT" in err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--temperature -1", "temperature=-1.0 must be"),
        ("--max-new-tokens 0", "max_new_tokens=0 must be at least 1"),
        ("--stop x --stop=", "--stop '' is empty"),
        ("--max-new-tokens 200", "context=203 (--context 203)"),
    ],
)
def test_the_command_checks_its_options_before_printing_the_prompt(folder, capsys, flags, said):
    assert main(["generate", folder, "--prompt", "abc", *flags.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert said in err
    assert err.count("\n") == 1


def test_text_without_a_tokenizer_is_refused():
    from tercet.model.transformer import Transformer

    model = language_model()
    bare = Transformer(model.config)
    with pytest.raises(PromptError, match="there is no tokenizer"):
        tercet.generate(bare, "abc")
    assert tercet.generate(bare, [1, 2], max_new_tokens=3).text == ""


def test_non_finite_logits_are_an_error():
    model = language_model()
    with torch.no_grad():
        model.norm.weight[0] = torch.nan
    with pytest.raises(TercetError, match="not finite"):
        tercet.generate(model, "abc", max_new_tokens=4)


def test_an_asynchronous_decoder_generates_the_same_tokens(monkeypatch):
    """As on a GPU: steps are launched before the tokens of earlier ones arrive, and rows end late."""
    model = language_model()
    options = {"max_new_tokens": 16, "temperature": 0.9, "seed": 5, "repetition_penalty": 1.3}
    free = tercet.generate(model, PROMPTS, eos_id=-1, **options)
    end, stop = free[2].tokens[5], free[1].text[4:6]
    wanted = tercet.generate(model, PROMPTS, eos_id=end, stop=(stop,), **options)
    begun = []

    class Ahead(CachedDecoder):
        def __init__(self, *given, **options):
            super().__init__(*given, **options)
            self.asynchronous = True

        def step(self, tokens, active):
            begun.append(int(active.sum()))
            return super().step(tokens, active)

    monkeypatch.setattr("tercet.inference.generate.CachedDecoder", Ahead)
    found = tercet.generate(model, PROMPTS, eos_id=end, stop=(stop,), **options)
    assert [(g.tokens, g.text, g.finished) for g in found] == [(g.tokens, g.text, g.finished) for g in wanted]
    assert {"eos", "stop"} <= {g.finished for g in found}
    assert begun == sorted(begun, reverse=True)
    assert begun[-1] < len(PROMPTS)
