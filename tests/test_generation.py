"""Text from whole models: the API of mlx-lm, the engine under it, and state that goes on in another process."""

import json
import subprocess
import sys
from functools import cache

import pytest
import torch
from model_goldens import FOLDER, golden
from test_models import model_of

import halfbyte
from halfbyte import cache_file
from halfbyte.cache import GROWTH
from halfbyte.chat import Tokenizer
from halfbyte.engine import Engine, Request, logits
from halfbyte.errors import CheckpointError, NotEnoughMemory, StorageError
from halfbyte.models.cache import make_prompt_cache, save_prompt_cache
from halfbyte.models.layers import MixtureBlock
from halfbyte.sampling import SamplingParams

NAME = "qwen3_5_moe-4bit"


@pytest.fixture(scope="module")
def loaded(folder):
    return halfbyte.load(folder, device="cpu")


@cache
def greedy(count, prompt=(5, 6, 7)):
    model, ids = model_of(NAME), list(prompt)
    row, kept = logits(model, ids)
    made = []
    for _ in range(count):
        made.append(int(row[-1].argmax()))
        row, kept = logits(model, made[-1:], kept)
    return made


def test_greedy_tokens_are_those_of_the_logits(loaded):
    model, tokenizer = loaded
    answers = list(halfbyte.stream_generate(model, tokenizer, [5, 6, 7], max_tokens=9))
    assert [answer.token for answer in answers] == greedy(9)
    assert "".join(answer.text for answer in answers) == tokenizer.decode(greedy(9))
    last = answers[-1]
    assert (last.finish_reason, last.prompt_tokens, last.generation_tokens) == ("length", 3, 9)
    assert all(answer.finish_reason is None for answer in answers[:-1])
    assert last.prompt_tps > 0 and last.generation_tps > 0 and last.peak_memory > 0
    assert last.logprobs.exp().sum() == pytest.approx(1) and int(last.logprobs.argmax()) == last.token
    assert last.from_draft is False


def test_memory_is_measured_at_the_first_token_and_the_last(loaded):
    from halfbyte.memory import forget_peak

    forget_peak(torch.device("cpu"))
    found = []
    for answer in halfbyte.stream_generate(*loaded, [5, 6, 7], max_tokens=5):
        found.append(answer.peak_memory)
        held = b"x" * 200_000_000 if len(found) == 2 else b""
    assert not held and len(set(found[:-1])) == 1 and found[-1] - found[0] > 0.15


def test_generate_is_the_whole_text(loaded, capsys):
    model, tokenizer = loaded
    text = halfbyte.generate(model, tokenizer, [5, 6, 7], max_tokens=9, verbose=True)
    said = capsys.readouterr()
    assert said.out.strip() == text.strip() == tokenizer.decode(greedy(9)).strip()
    assert "tokens-per-sec" in said.err


def test_the_script_that_stands_in_every_model_card_of_mlx_community(loaded):
    """As mlx-lm writes it (create_model_card), but for the import."""
    model, tokenizer = loaded
    prompt = "hello"
    if tokenizer.chat_template is not None:
        messages = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    ids = tokenizer.chat_ids([{"role": "user", "content": "hello"}])
    assert prompt == ids and "hello" in tokenizer.chat_template.replace("message.content", "hello")
    assert halfbyte.generate(model, tokenizer, prompt=prompt, max_tokens=3) == tokenizer.decode(greedy(3, tuple(ids)))


def test_the_tokenizer_has_the_names_that_scripts_ask_for(loaded):
    tokenizer = loaded[1]
    assert tokenizer.eos_token_ids == tokenizer.eos_ids and tokenizer.eos_token_id in tokenizer.eos_ids
    bare = Tokenizer(tokenizer.tokens, {}, {}, [], {}, tokenizer.vocab_size)
    assert (bare.chat_template, bare.eos_token_id, bare.eos_token_ids) == (None, None, frozenset())


def test_a_text_prompt_is_tokenised(loaded):
    model, tokenizer = loaded
    by_text = halfbyte.generate(model, tokenizer, "The quick", max_tokens=5)
    assert by_text == halfbyte.generate(model, tokenizer, tokenizer.encode("The quick"), max_tokens=5)


def test_an_end_of_text_token_ends_it(loaded):
    model, tokenizer = loaded
    third = greedy(9)[2]
    ending = Tokenizer(tokenizer.tokens, tokenizer.named, tokenizer.templates, [third], {}, tokenizer.vocab_size)
    answers = list(halfbyte.stream_generate(model, ending, [5, 6, 7], max_tokens=9))
    first = greedy(9).index(third)
    assert [answer.token for answer in answers] == greedy(9)[: first + 1]
    assert answers[-1].finish_reason == "stop"


def test_a_stop_string_ends_it(loaded):
    model, tokenizer = loaded
    whole = tokenizer.decode(greedy(9))
    stop = whole[4:6]
    answers = list(halfbyte.stream_generate(model, tokenizer, [5, 6, 7], max_tokens=9, stop=stop))
    assert "".join(answer.text for answer in answers) == whole[: whole.index(stop)]
    assert answers[-1].finish_reason == "stop" and len(answers) < 9
    last = list(halfbyte.stream_generate(model, tokenizer, [5, 6, 7], max_tokens=len(answers), stop=stop))
    assert last[-1].finish_reason == "stop", "though no more tokens were allowed"
    batch = halfbyte.batch_generate(model, tokenizer, [[5, 6, 7]], max_tokens=len(answers), stop=stop)
    assert batch.finish_reasons == ["stop"]


def test_a_seed_repeats_a_draw_and_a_row_draws_alone(loaded):
    model, tokenizer = loaded
    wish = {"temperature": 1.0, "top_p": 0.9, "seed": 11}
    prompts = [[5, 6, 7], [9] * 30, [1]]
    alone = [halfbyte.generate(model, tokenizer, prompt, max_tokens=8, **wish) for prompt in prompts]
    together = halfbyte.batch_generate(model, tokenizer, prompts, max_tokens=8, **wish)
    assert together.texts == alone
    other = halfbyte.generate(model, tokenizer, prompts[0], max_tokens=8, **{**wish, "seed": 12})
    assert other != alone[0]


def test_a_batch_larger_than_its_slots(loaded):
    model, tokenizer = loaded
    prompts = [[5 + i] * (1 + 7 * i % 40) for i in range(9)]
    limits = [1 + i for i in range(9)]
    batch = halfbyte.batch_generate(
        model, tokenizer, prompts, max_tokens=limits, completion_batch_size=4, prefill_step_size=16
    )
    for prompt, limit, ids, text in zip(prompts, limits, batch.token_ids, batch.texts, strict=True):
        assert ids == greedy(limit, tuple(prompt)) and text == tokenizer.decode(ids)
    assert batch.stats.generation_tokens == sum(limits) and batch.finish_reasons == ["length"] * 9
    assert halfbyte.batch_generate(model, tokenizer, []).texts == []


def test_a_batch_takes_what_mlx_lms_takes(loaded, capsys):
    """Its arguments in its order; the token that ended a reply is none of it."""
    model, tokenizer = loaded
    third = greedy(9)[2]
    ending = Tokenizer(tokenizer.tokens, tokenizer.named, tokenizer.templates, [third], {}, tokenizer.vocab_size)
    batch = halfbyte.batch_generate(model, ending, [[5, 6, 7], [9] * 30], None, [9, 4], True, False, True, True)
    assert batch.token_ids == [greedy(9)[:2], greedy(4, (9,) * 30)] and batch.finish_reasons == ["stop", "length"]
    assert [len(row) for row in batch.logprobs] == [2, 4]
    scores = torch.log_softmax(logits(model, [5, 6, 7])[0][-1], -1)
    assert batch.logprobs[0][0] == pytest.approx(float(scores.max()))
    assert "tokens-per-sec" in capsys.readouterr().err
    chosen = halfbyte.batch_generate(
        model, tokenizer, [[5, 6, 7]], max_tokens=1, sampler=lambda scores: scores.argmin(-1)
    )
    assert chosen.token_ids == [[int(scores.argmin())]] and chosen.logprobs is None
    with pytest.raises(ValueError, match="return_prompt_caches"):
        halfbyte.batch_generate(model, tokenizer, [[5]], return_prompt_caches=True)


def test_a_batch_of_texts(loaded):
    """Texts as well as ids, a length for each; one text is no list of its characters."""
    model, tokenizer = loaded
    texts, given = ["The quick", "Oslo"], [4, 2]
    batch = halfbyte.batch_generate(model, tokenizer, [texts[0], tokenizer.prompt_ids(texts[1])], max_tokens=given)
    pairs = zip(texts, given, strict=True)
    assert batch.texts == [halfbyte.generate(model, tokenizer, text, max_tokens=most) for text, most in pairs]
    with pytest.raises(ValueError, match="one for each of 2 prompts, got 1"):
        halfbyte.batch_generate(model, tokenizer, texts, max_tokens=[4])
    with pytest.raises(ValueError, match="a list of texts"):
        halfbyte.batch_generate(model, tokenizer, "The quick")


def test_minus_one_is_no_limit(loaded):
    model, tokenizer = loaded
    ids = [5] * (model.context - 20)
    answers = list(halfbyte.stream_generate(model, tokenizer, ids, max_tokens=-1))
    assert len(answers) <= 20 and answers[-1].finish_reason in ("stop", "length")


def test_a_prompt_cache_goes_on(loaded):
    model, tokenizer = loaded
    kept = model.new_cache()
    halfbyte.generate(model, tokenizer, [5, 6, 7], max_tokens=4, prompt_cache=kept)
    assert kept.lengths == [7], "as mlx-lm's: all that was read and made"
    more = list(halfbyte.stream_generate(model, tokenizer, [8, 9], max_tokens=3, prompt_cache=kept))
    assert [one.token for one in more] == greedy(3, (5, 6, 7, *greedy(4), 8, 9))


def failing_at(monkeypatch, number):
    """Have the number-th mixture that is computed from now on fail."""
    compute, left = MixtureBlock.__call__, [number]

    def counted(self, x):
        left[0] -= 1
        if not left[0]:
            raise StorageError("shard.safetensors: cannot be read")
        return compute(self, x)

    monkeypatch.setattr(MixtureBlock, "__call__", counted)


@pytest.mark.parametrize("number", [2, 9], ids=["in the prompt", "in a later step"])
def test_a_prompt_cache_whose_step_failed_is_not_taken_for_whole(loaded, monkeypatch, tmp_path, number):
    model, tokenizer = loaded
    assert len(model.layers) <= 4
    kept = make_prompt_cache(model)
    halfbyte.generate(model, tokenizer, [5, 6, 7], max_tokens=2, prompt_cache=kept)
    with monkeypatch.context() as patch:
        failing_at(patch, number)
        with pytest.raises(StorageError):
            halfbyte.generate(model, tokenizer, [8, 9], max_tokens=9, prompt_cache=kept)
    for use in (
        lambda: halfbyte.generate(model, tokenizer, [4], prompt_cache=kept),
        lambda: logits(model, [4], kept),
        lambda: save_prompt_cache(tmp_path / "kept.safetensors", kept),
    ):
        with pytest.raises(ValueError, match="a step of it failed or was interrupted"):
            use()
    kept.reset(0)
    assert torch.equal(logits(model, [5, 6], kept)[0], logits(model, [5, 6])[0])


def test_a_prompt_cache_of_rows_alone_goes_on_after_a_step_that_failed(monkeypatch):
    model = model_of("qwen3_moe-4bit")
    _, kept = logits(model, [5, 6, 7])
    with monkeypatch.context() as patch:
        failing_at(patch, 2)
        with pytest.raises(StorageError):
            logits(model, [8, 9], kept)
    assert torch.equal(logits(model, [4], kept)[0], logits(model, [5, 6, 7, 4])[0][-1:])


def test_processors_and_penalties_know_what_a_prompt_cache_holds_if_they_are_told(loaded):
    model, tokenizer = loaded
    whole, seen = [5, 6, 7, 8, 9, 10], []

    def look(ids, row):
        seen.append(ids.tolist())
        return row

    options = {"max_tokens": 6, "repetition_penalty": 3.0, "temperature": 0}
    wanted = halfbyte.generate(model, tokenizer, whole, **options)
    kept = logits(model, whole[:4])[1]
    given = {"prompt_cache": kept, "held_ids": whole[:4], "logits_processors": [look]}
    answers = list(halfbyte.stream_generate(model, tokenizer, whole[4:], **options, **given))
    assert "".join(one.text for one in answers) == wanted and seen[0] == whole and len(seen[1]) == 7
    assert answers[-1].prompt_tokens == 2
    for wrong in ({"prompt_cache": kept}, {}):
        with pytest.raises((TypeError, ValueError), match=r"held_ids: 1 ids|prompt_cache must be"):
            halfbyte.generate(model, tokenizer, [1], held_ids=[5], **wrong)


def test_room_for_a_long_reply_is_made_as_it_comes(loaded, monkeypatch):
    model, tokenizer = loaded
    kept = model.new_cache()
    wanted = halfbyte.generate(model, tokenizer, [5, 6, 7], max_tokens=60)
    monkeypatch.setattr("halfbyte.generation.MOST_AHEAD", 3)
    monkeypatch.setitem(GROWTH, "cpu", 8)
    capacities, text = [], ""
    for answer in halfbyte.stream_generate(model, tokenizer, [5, 6, 7], max_tokens=60, prompt_cache=kept):
        capacities.append(kept.capacity)
        text += answer.text
    assert text == wanted and capacities[0] == 8 and len({*capacities}) > 2
    monkeypatch.setattr("halfbyte.memory.available", lambda device: 1000)
    with pytest.raises(NotEnoughMemory, match="a text of 3 tokens and its reply needs"):
        halfbyte.generate(model, tokenizer, [5, 6, 7], max_tokens=9, prompt_cache=model.new_cache())
    with pytest.raises(NotEnoughMemory, match=r"2 texts \(completion_batch_size\) of 12 tokens \(max_tokens\) needs"):
        halfbyte.batch_generate(model, tokenizer, [[5, 6, 7]] * 2, max_tokens=9)


def test_the_hooks_of_mlx_lm(loaded):
    model, tokenizer = loaded
    seen = []

    def ban(ids, scores):
        seen.append(ids.tolist())
        scores = scores.clone()
        scores[:, greedy(1)[0]] = -torch.inf
        return scores

    first = next(halfbyte.stream_generate(model, tokenizer, [5, 6, 7], logits_processors=[ban]))
    assert first.token == int(logits(model, [5, 6, 7])[0][-1].topk(2).indices[1]) and seen == [[5, 6, 7]]
    chosen = next(halfbyte.stream_generate(model, tokenizer, [5, 6, 7], sampler=lambda scores: scores.argmin(-1)))
    assert chosen.token == int(logits(model, [5, 6, 7])[0][-1].argmin())


def test_progress_of_a_prompt(loaded):
    model, tokenizer = loaded
    said = []
    options = {"prefill_step_size": 16, "prompt_progress_callback": lambda done, total: said.append((done, total))}
    next(halfbyte.stream_generate(model, tokenizer, [1] * 40, max_tokens=3, **options))
    assert said == [(16, 40), (32, 40), (40, 40)]


@pytest.mark.parametrize(
    ("prompt", "options", "said"),
    [
        ([], {}, "prompt is empty"),
        ([512], {}, "from 0 to 511"),
        ([1], {"max_tokens": 0}, "max_tokens must be 1 or more, or -1"),
        ([1], {"max_tokens": -2}, "max_tokens must be 1 or more, or -1"),
        ([1], {"temperature": float("nan")}, "temperature"),
        ([1] * 99999, {}, "context is"),
    ],
)
def test_bad_requests_are_refused(loaded, prompt, options, said):
    with pytest.raises(ValueError, match=said):
        list(halfbyte.stream_generate(*loaded, prompt, **options))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"temprature": 1.0}, "no parameter temprature: did you mean temperature"),
        ({"temp": 0.7}, "temp is not taken here: use temperature"),
        ({"repetition_context_size": 30}, "use logits_processors=make_logits_processors"),
        ({"xtc_probability": 0.1}, "use sampler=make_sampler"),
        ({"draft_model": object()}, "draft_model is not taken: there is no speculative decoding"),
        ({"kv_bits": 4}, "kv_bits is not taken"),
        ({"max_kv_size": 512}, "max_kv_size is not taken"),
        ({"anything": 1}, "no parameter anything$"),
    ],
)
def test_a_name_that_is_not_taken_is_told_where_to_go(loaded, options, said):
    with pytest.raises(TypeError, match=said):
        halfbyte.generate(*loaded, [1], **options)
    with pytest.raises(TypeError, match=said):
        halfbyte.batch_generate(*loaded, [[1]], **options)


def test_what_is_none_is_not_given(loaded):
    """mlx-lm's command line and scripts pass on what nobody asked for."""
    names = ["sampler", "logits_processors", "prompt_cache", "prompt_progress_callback", "draft_model", "max_kv_size"]
    unasked = {**dict.fromkeys([*names, "kv_bits", "temperature", "seed"]), "kv_group_size": 64, "num_draft_tokens": 3}
    text = halfbyte.generate(*loaded, [5, 6, 7], max_tokens=4, quantized_kv_start=5000, **unasked)
    assert text == halfbyte.generate(*loaded, [5, 6, 7], max_tokens=4)


def test_parameters_beside_a_sampler_would_count_for_nothing(loaded):
    with pytest.raises(ValueError, match="seed, temperature: without effect beside a sampler"):
        halfbyte.generate(*loaded, [5], sampler=lambda scores: scores.argmin(-1), temperature=0.7, seed=1)


def test_requests_join_and_leave_at_every_step():
    model = model_of(NAME)
    engine = Engine(model, model.new_cache(2, 64, chunk=8))
    first, second, third = (Request([5 + i, 6, 7], 6) for i in range(3))
    engine.submit(first)
    engine.step()
    engine.submit(second)
    engine.submit(third)
    engine.step()
    engine.cancel(first)
    while engine.busy:
        engine.step()
    assert first.finish_reason == "cancelled" and len(first.made) == 2
    assert second.made == greedy(6, (6, 6, 7)) and third.made == greedy(6, (7, 6, 7))
    assert sorted(engine.free) == [0, 1]


def test_a_cancelled_request_that_waits_never_runs():
    model = model_of(NAME)
    engine = Engine(model, model.new_cache(1, 64))
    runs, waits = Request([1, 2], 2, SamplingParams()), Request([3, 4], 2)
    engine.submit(runs)
    engine.submit(waits)
    engine.cancel(waits)
    while engine.busy:
        engine.step()
    assert len(runs.made) == 2 and not waits.made


IN_ANOTHER_PROCESS = """
import sys, torch, halfbyte
from halfbyte import cache_file
from halfbyte.cache import GROWTH
model = halfbyte.load_model(sys.argv[1])
kept, ids = cache_file.load(sys.argv[2], model)
rows, _ = halfbyte.logits(model, [1, 2, 3], kept)
torch.save(rows, sys.argv[3])
"""


@pytest.mark.parametrize("name", ["qwen3_5_moe-4bit", "gemma4_e-4bit", "deepseek_v3-4bit"])
def test_a_saved_state_goes_on_in_another_process(name, tmp_path):
    model, ids = model_of(name), golden(name)["prompt"].tolist()
    _, kept = logits(model, ids)
    cache_file.save(tmp_path / "state", model, kept, ids)
    straight, _ = logits(model, [1, 2, 3], kept)
    command = [sys.executable, "-c", IN_ANOTHER_PROCESS, FOLDER / name, tmp_path / "state", tmp_path / "rows"]
    subprocess.run(command, check=True)
    assert torch.equal(torch.load(tmp_path / "rows", weights_only=True), straight)


def with_ids(text):
    return {"metadata": json.dumps({"ids": text})}


class TestRow73:
    """A prompt-cache file of another model, truncated, with NaN, or of a later version is refused."""

    @pytest.fixture()
    def saved(self, tmp_path):
        model = model_of(NAME)
        _, kept = logits(model, [1, 2, 3, 4])
        cache_file.save(tmp_path / "state", model, kept, [1, 2, 3, 4])
        return tmp_path / "state"

    def refused(self, path, said, name=NAME):
        with pytest.raises(CheckpointError, match=said):
            cache_file.load(path, model_of(name))

    def test_another_model(self, saved):
        self.refused(saved, "another checkpoint", "qwen3_moe-4bit")

    @pytest.mark.parametrize("keep", [0, 3, 100, -1])
    def test_truncated(self, saved, keep):
        data = saved.read_bytes()
        saved.write_bytes(data[:keep])
        self.refused(saved, "not a prompt cache")

    def test_absent(self, tmp_path):
        self.refused(tmp_path / "nothing", "no such prompt cache")

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"version": "2"}, "version '2'"),
            (with_ids("[1, 2, 3]"), "3 token ids for the state of 4"),
            (with_ids("[1, 2, 3, 99999]"), "ids are damaged"),
            (with_ids("{"), "not a prompt cache"),
            (with_ids("[" * 100_000), "not a prompt cache: its token ids: it nests deeper than 64. Delete it"),
            (with_ids(f"[{'9' * 5000}]"), "not a prompt cache: its token ids: an integer of 5000 digits"),
            (with_ids("\ud800"), "not a prompt cache"),
            ({"metadata": "{}"}, "ids are damaged"),
        ],
    )
    def test_metadata(self, saved, change, said):
        from safetensors import safe_open
        from safetensors.torch import load_file, save_file

        with safe_open(saved, "pt") as file:
            metadata = file.metadata()
        save_file(load_file(saved), saved, {**metadata, **change})
        self.refused(saved, said)

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_not_finite(self, saved, value):
        from safetensors import safe_open
        from safetensors.torch import load_file, save_file

        with safe_open(saved, "pt") as file:
            metadata = file.metadata()
        tensors = load_file(saved)
        tensors["layers.0.state"].view(-1)[3] = value
        save_file(tensors, saved, metadata)
        self.refused(saved, "NaN or infinite")

    def test_a_disk_that_is_full_leaves_the_old_file(self, saved, monkeypatch):
        before = saved.read_bytes()

        def full(descriptor):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("os.fsync", full)
        model = model_of(NAME)
        _, kept = logits(model, [9, 9])
        with pytest.raises(StorageError, match="No space left"):
            cache_file.save(saved, model, kept, [9, 9])
        assert saved.read_bytes() == before and list(saved.parent.iterdir()) == [saved]
