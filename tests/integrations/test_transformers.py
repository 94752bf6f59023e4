"""The real Trainer, peft, trl and accelerate, against the same steps done by hand."""

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import IterableDataset, SequentialSampler

import holdfast as hf
from holdfast.errors import UsageError

transformers = pytest.importorskip("transformers", reason="make friends installs transformers")
pytest.importorskip("accelerate", reason="make friends installs accelerate")
from transformers import (  # noqa: E402
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

from holdfast.integrations.transformers import (  # noqa: E402
    EarlierPerplexity,
    ReplayArguments,
    ReplayMixin,
    ReplayTrainer,
)
from holdfast.integrations.transformers.arguments import BETAS  # noqa: E402
from holdfast.integrations.transformers.buffer_file import FILE  # noqa: E402

pytestmark = [  # what these packages say about each other
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

VOCABULARY, POSITIONS = 40, 24


def network(**options):
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_positions": POSITIONS, "n_embd": 16, "n_layer": 1, "n_head": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**(sizes | ends | options)))


def samples(count=48, seed=1):
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 14, (count,), generator=draw).tolist()
    tokens = [torch.randint(1, VOCABULARY, (length,), generator=draw) for length in lengths]
    return [{"input_ids": each, "attention_mask": torch.ones_like(each), "labels": each} for each in tokens]


def collate(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    fills = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {
        name: torch.stack([F.pad(row[name], (0, longest - len(row[name])), value=fill) for row in rows])
        for name, fill in fills.items()
    }


def arguments(folder, **options):
    given = {
        "per_device_train_batch_size": 4, "max_steps": 6, "learning_rate": 0.1, "optim": "sgd", "max_grad_norm": 0,
        "lr_scheduler_type": "constant", "save_strategy": "no", "logging_steps": 1, "report_to": [], "use_cpu": True,
        "disable_tqdm": True,
    } | options  # fmt: skip
    return TrainingArguments(str(folder), **given)


class InOrder(ReplayTrainer):
    """Takes the samples as they come, so that others can do the same steps."""

    def _get_train_sampler(self, *args, **kwargs):
        return SequentialSampler(self.train_dataset)


def trainer(folder, kind=InOrder, model=None, data=None, replay=None, callbacks=None, tokenizer=None, **options):
    return kind(
        model=model or network(),
        args=arguments(folder, **options),
        train_dataset=data or samples(),
        data_collator=collate,
        callbacks=callbacks,
        processing_class=tokenizer,
        replay_args=ReplayArguments(**({"buffer_size": 10, "top_k": 5, "beta": 5.0} | (replay or {}))),
    )


def weights(model):
    return {name: each.detach().clone() for name, each in model.named_parameters()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def close(one, other):
    return all(torch.allclose(one[name], other[name], rtol=1e-4, atol=1e-6) for name in one)


def stored(buffer):
    """All that a buffer holds, as plain values."""
    state = buffer.state_dict()
    return state["offered"], state["generator"].tolist(), [column.tolist() for column in state["columns"]]


# --- the steps -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("regularizer", ["kl", "mse", "linf", None])
def test_it_makes_the_steps_of_the_learner(regularizer, tmp_path):
    ours = trainer(tmp_path, model=no_dropout(), replay={"regularizer": regularizer, "seed": 3})
    ours.train()
    model = no_dropout()
    padding = {"input_ids": 0, "attention_mask": 0, "y": -100}
    options = {"buffer_size": 10, "replay": 0.25, "class_dim": -1, "padding": padding, "seed": 3}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if regularizer is None:
        learner = hf.ExperienceReplay(model, optimizer, alpha=4.0, **options)
    else:
        learner = hf.ConsistencyReplay(
            model, optimizer, regularizer=regularizer, beta=5.0, answers=hf.TopK(5), **options
        )
    rows = samples()
    model.train()
    for start in range(0, 24, 4):
        batch = collate(rows[start : start + 4])
        labels = hf.next_tokens(batch.pop("labels"))
        losses = learner.observe(batch, labels)
    assert ours.learner.buffer.contents().y.tolist() == learner.buffer.contents().y.tolist()
    logged = ours.state.log_history[-2]
    for name, term in losses.terms.items():
        assert logged[f"loss_{name}"] == pytest.approx(term.item(), rel=1e-4, abs=1e-6), name
    assert logged["loss"] == pytest.approx(losses.total.item(), rel=1e-4)


@pytest.mark.parametrize(
    ("replay", "beta"),
    [
        ({"regularizer": "kl", "beta": None}, BETAS["kl"]),
        ({"regularizer": "mse", "beta": None}, BETAS["mse"]),
        ({"regularizer": "linf", "beta": None}, BETAS["linf"]),
        ({"regularizer": "l1", "beta": None}, 1.0),
        ({"regularizer": "mse", "beta": None, "top_k": None}, 1.0),
        ({"regularizer": "kl", "beta": 0.0}, 0.0),
    ],
)
def test_a_weight_that_is_left_out_is_the_best_that_was_found(replay, beta, tmp_path):
    ours = trainer(tmp_path, replay=replay, max_steps=1)
    ours.train()
    assert ours.learner.beta == beta
    assert ReplayArguments(10).beta is None


def no_dropout():
    return network(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=POSITIONS, **sizes))


@pytest.mark.parametrize("micro_steps", [1, 3])
def test_a_step_with_nothing_stored_is_that_of_the_plain_trainer(micro_steps, tmp_path):
    options = {"max_steps": 1, "gradient_accumulation_steps": micro_steps}
    ours = trainer(tmp_path, model=llama(), kind=ReplayTrainer, **options)
    ours.train()
    plain = Trainer(model=llama(), args=arguments(tmp_path, **options), train_dataset=samples(), data_collator=collate)
    plain.train()
    assert close(weights(ours.model), weights(plain.model))
    assert ours.state.log_history[0]["loss"] == pytest.approx(plain.state.log_history[0]["loss"], rel=1e-5)


@pytest.mark.parametrize("regularizer", ["kl", None])
def test_four_micro_steps_are_one_step_of_four_times_the_size(regularizer, tmp_path):
    """A window of one sample makes all draws alike; micro-steps have different numbers of tokens."""
    replay = {"buffer_size": 1, "buffer_policy": "window", "regularizer": regularizer, "replay": 0.125, "beta": 50.0}
    one = trainer(tmp_path, model=no_dropout(), replay=replay, per_device_train_batch_size=8, max_steps=4)
    if regularizer is None:  # the mean over minibatch and draw depends on how large the minibatch is, so weigh nothing
        replay["alpha"] = 0.0
        one = trainer(tmp_path, model=no_dropout(), replay=replay, per_device_train_batch_size=8, max_steps=1)
    one.train()
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": one.args.max_steps}
    four = trainer(tmp_path, model=no_dropout(), replay=replay, **sizes)
    four.train()
    assert close(weights(one.model), weights(four.model))
    assert (
        one.learner.buffer.contents().x["input_ids"].tolist() == four.learner.buffer.contents().x["input_ids"].tolist()
    )
    assert one.learner.buffer.state_dict()["offered"] == four.learner.buffer.state_dict()["offered"]
    last = {name: value for name, value in one.state.log_history[-2].items() if name.startswith("loss")}
    assert {name: four.state.log_history[-2][name] for name in last} == pytest.approx(last, rel=1e-4)


def test_samples_are_offered_when_the_optimiser_has_made_its_step(tmp_path):
    seen = []

    class Watch(transformers.TrainerCallback):
        def on_substep_end(self, *args, **kwargs):
            seen.append(("micro-step", ours.learner.buffer.stored))

        def on_step_end(self, *args, **kwargs):
            seen.append(("step", ours.learner.buffer.stored))

    ours = trainer(
        tmp_path, callbacks=[Watch()], gradient_accumulation_steps=2, max_steps=2, replay={"buffer_size": 99}
    )
    ours.train()
    assert seen == [("micro-step", 0), ("step", 8), ("micro-step", 8), ("step", 16)]


def test_a_step_that_is_skipped_stores_nothing_and_counts_in_the_logs(monkeypatch, tmp_path):
    """As the scaler of float16 does where a gradient is too large."""
    ours = trainer(tmp_path, max_steps=4, logging_steps=2, replay={"buffer_size": 99})
    skipped = property(lambda _: ours.state.global_step in (1, 2))
    monkeypatch.setattr(type(ours.accelerator), "optimizer_step_was_skipped", skipped)
    ours.train()
    assert ours.learner.buffer.offered == 8
    for logged in ours.state.log_history[:2]:
        terms = logged["loss_current"] + logged["loss_replay"] + 5 * logged["loss_consistency"]
        assert logged["loss"] == pytest.approx(terms, rel=1e-4)


class Endless(IterableDataset):
    """Samples whose number nobody knows in advance, so that an epoch may end within a group of micro-steps."""

    def __init__(self, count):
        self.rows = samples(count)

    def __iter__(self):
        return iter(self.rows)


@pytest.mark.parametrize("regularizer", ["kl", None])
def test_a_group_of_micro_steps_that_an_epoch_cuts_short_is_continued_in_the_next(regularizer, tmp_path):
    """Three minibatches an epoch, two a step: the Trainer adds the gradient of the third to that of the next two."""
    ours = trainer(
        tmp_path, data=Endless(12), gradient_accumulation_steps=2, max_steps=3,
        replay={"buffer_size": 99, "regularizer": regularizer},
    )  # fmt: skip
    ours.train()
    rows, found = samples(12), ours.learner.buffer.contents().x
    held = [ids[mask == 1].tolist() for ids, mask in zip(found["input_ids"], found["attention_mask"], strict=True)]
    assert held == [row["input_ids"].tolist() for row in (*rows, *rows, *rows[:8])]


def test_evaluation_is_the_trainers_own_and_stores_nothing(tmp_path):
    ours = trainer(tmp_path, model=llama(), max_steps=2)
    ours.train()
    before = stored(ours.learner.buffer)
    plain = Trainer(model=ours.model, args=arguments(tmp_path), data_collator=collate)
    assert ours.evaluate(samples(8))["eval_loss"] == pytest.approx(plain.evaluate(samples(8))["eval_loss"])
    assert stored(ours.learner.buffer) == before


def test_classifiers_of_whole_sequences_store_all_their_logits(tmp_path):
    sizes = {"vocab_size": VOCABULARY, "n_positions": POSITIONS, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = GPT2ForSequenceClassification(GPT2Config(**sizes, num_labels=3, pad_token_id=0))
    data = [{"input_ids": torch.randint(1, 40, (6,)), "labels": torch.tensor(number % 3)} for number in range(24)]
    ours = InOrder(
        model=model, args=arguments(tmp_path), train_dataset=data, replay_args=ReplayArguments(8, regularizer="linf")
    )
    ours.train()
    assert ours.learner.buffer.contents().logits.shape == (8, 3)


# --- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", ["device", "folder"])
@pytest.mark.parametrize("micro_steps", [1, 2])
def test_resuming_in_mid_epoch_equals_the_uninterrupted_run(storage, micro_steps, tmp_path):
    """Dropout included: 48 samples are 12 minibatches; the checkpoint is after step 4, the epoch ends later."""
    sizes = {"max_steps": 9, "gradient_accumulation_steps": micro_steps, "optim": "adamw_torch", "learning_rate": 1e-2}

    def options(name):
        place = "device" if storage == "device" else str(tmp_path / name)
        return sizes | {"replay": {"storage": place}, "kind": ReplayTrainer}

    whole = trainer(tmp_path / "whole", **options("whole buffer"))
    whole.train()
    cut = {"save_strategy": "steps", "save_steps": 4}
    first = trainer(tmp_path / "cut", **options("cut buffer"), **cut)

    class Stop(transformers.TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            control.should_training_stop = True

    first.add_callback(Stop())
    first.train()
    assert first.state.global_step == 4
    first.learner.buffer.close()
    second = trainer(tmp_path / "cut", **options("cut buffer"), **cut)
    second.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-4"))
    assert second.state.global_step == 9
    assert same(weights(second.model), weights(whole.model))
    assert second.learner.buffer.contents().y.tolist() == whole.learner.buffer.contents().y.tolist()
    assert second.learner.buffer.generator.get_state().equal(whole.learner.buffer.generator.get_state())


def test_a_second_call_and_a_second_trainer_continue_the_buffer(tmp_path):
    ours = trainer(tmp_path / "a", max_steps=2, replay={"buffer_size": 99})
    ours.train()
    ours.train_dataset = samples(seed=2)
    ours.train()
    assert ours.learner.buffer.stored == 16
    ours.save_buffer(tmp_path / "kept")
    held = ours.learner.buffer.contents().x["input_ids"]
    other = trainer(
        tmp_path / "b", max_steps=1, model=ours.model, replay={"buffer_size": 99, "buffer_from": str(tmp_path / "kept")}
    )
    other.train()
    assert other.learner.buffer.stored == 20
    now = other.learner.buffer.contents().x["input_ids"][:16]
    assert F.pad(now, (0, 9))[:, : held.shape[1]].tolist() == held.tolist()


@pytest.mark.parametrize("storage", ["device", "folder"])
@pytest.mark.parametrize("earlier", [False, True])
def test_a_model_that_is_made_anew_begins_with_the_buffer_anew(earlier, storage, tmp_path):
    """As in a search for settings. The stored logits would be those of a model that is gone."""
    replay = {"buffer_size": 10, "top_k": 5, "storage": "device" if storage == "device" else str(tmp_path / "samples")}
    if earlier:
        first = trainer(tmp_path / "a", max_steps=4, replay={"buffer_size": 10})
        first.train()
        first.save_buffer(tmp_path / "kept")
        replay["buffer_from"] = str(tmp_path / "kept")
    ours = InOrder(
        model_init=no_dropout, args=arguments(tmp_path / "b", max_steps=3), train_dataset=samples(seed=2),
        data_collator=collate, replay_args=ReplayArguments(**replay),
    )  # fmt: skip
    ours.train()
    once, losses = stored_samples(ours), ours.state.log_history[:-1]
    ours.train()
    assert stored_samples(ours) == once
    assert ours.learner.buffer.offered == 12 + 16 * earlier
    assert [each["loss"] for each in ours.state.log_history[:-1]] == [each["loss"] for each in losses]


def stored_samples(trainer):
    found = trainer.learner.buffer.contents()
    return found.y.tolist(), found.logits["values"].tolist()


def test_a_checkpoint_without_a_buffer_is_refused(tmp_path):
    plain = Trainer(
        model=network(), args=arguments(tmp_path, max_steps=1, save_strategy="steps", save_steps=1),
        train_dataset=samples(), data_collator=collate,
    )  # fmt: skip
    plain.train()
    with pytest.raises(UsageError, match=r"holds no buffer: holdfast\.safetensors is missing"):
        trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


# --- friends ---------------------------------------------------------------------------------------------------------


def test_with_lora_only_the_adapter_moves_and_the_run_resumes(tmp_path):
    peft = pytest.importorskip("peft")

    def adapted():
        config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
        return peft.get_peft_model(network(), config)

    options = {"save_strategy": "steps", "save_steps": 3, "learning_rate": 1.0}
    ours = trainer(tmp_path, model=adapted(), **options)
    before = weights(ours.model)
    ours.train()
    moved = {name for name, each in weights(ours.model).items() if not each.equal(before[name])}
    assert moved
    assert all("lora_" in name for name in moved)
    assert ours.learner.buffer.stored == 10
    again = trainer(tmp_path, model=adapted(), **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert same(weights(again.model), weights(ours.model))


def test_in_bfloat16_the_loss_stays_close(tmp_path):
    fine, coarse = trainer(tmp_path), trainer(tmp_path, bf16=True)
    fine.train()
    coarse.train()
    assert not same(weights(fine.model), weights(coarse.model))
    assert coarse.state.log_history[-2]["loss"] == pytest.approx(fine.state.log_history[-2]["loss"], rel=0.02)


def test_a_compiled_model_makes_the_same_steps(tmp_path):
    plain = trainer(tmp_path, model=no_dropout())
    compiled = trainer(tmp_path, model=no_dropout(), torch_compile=True, torch_compile_backend="aot_eager")
    plain.train()
    compiled.train()
    assert hasattr(compiled.model_wrapped, "_orig_mod")
    assert close(weights(compiled.model), weights(plain.model))


def make_tokenizer(texts, **options):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    made.train_from_iterator(
        texts, tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<end>"], show_progress=False, **options)
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<end>")


TEXTS = ["the old harbour and the new one", "a rope, a sail, a rope", "what holds fast is the root of kelp"] * 8


def test_the_trainer_of_trl(tmp_path):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    from holdfast.integrations.transformers import ReplaySFTTrainer

    tokenizer = make_tokenizer(TEXTS)
    config = trl.SFTConfig(
        str(tmp_path), per_device_train_batch_size=4, max_steps=6, report_to=[], use_cpu=True, save_steps=3, bf16=False,
        max_length=POSITIONS, logging_steps=1, gradient_accumulation_steps=2, disable_tqdm=True, learning_rate=1e-2,
    )  # fmt: skip

    def make():
        return ReplaySFTTrainer(
            model=network(vocab_size=len(tokenizer)), args=config, processing_class=tokenizer,
            train_dataset=datasets.Dataset.from_dict({"text": TEXTS}), replay_args=ReplayArguments(10, beta=20.0),
        )  # fmt: skip

    ours = make()
    ours.train()
    assert isinstance(ours, ReplayMixin)
    assert isinstance(ours, trl.SFTTrainer)
    assert ours.learner.buffer.stored == 10
    logged = ours.state.log_history[-2]
    assert logged["loss"] == pytest.approx(
        logged["loss_current"] + logged["loss_replay"] + 20 * logged["loss_consistency"], rel=1e-4
    )
    again = make()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert same(weights(again.model), weights(ours.model))


RANK = """
import sys
sys.path.insert(0, {tests!r})
from test_transformers import *
rank, folder = int(os.environ["RANK"]), Path({folder!r})
torch.set_num_threads(1)
options = dict(max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2, save_strategy="steps")
options |= dict(save_steps=2, replay={{"buffer_size": 12}})
ours = trainer(folder, kind=ReplayTrainer, model=no_dropout(), ddp_backend="gloo", **options)
ours.train()
state = ours.learner.buffer.state_dict()
again = trainer(folder, kind=ReplayTrainer, model=no_dropout(), ddp_backend="gloo", **options)
again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
earlier = EarlierPerplexity({{"code": samples(7, seed=5)}}, ours)
(folder / f"rank{{rank}}.json").write_text(json.dumps({{
    "perplexity": earlier.measure()["code"], "expected": perplexity(ours.model, samples(7, seed=5)),
    "offered": int(state["offered"]), "stored": ours.learner.buffer.stored, "ranks": ours.learner.ranks.size,
    "sum": sum(each.double().sum().item() for each in ours.model.parameters()),
    "resumed": same(weights(ours.model), weights(again.model)),
    "logs": {{k: v for k, v in ours.state.log_history[-2].items() if k.startswith("loss")}},
}}))
"""


def test_two_ranks_share_one_buffer(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    code = RANK.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "true"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code],
            env=os.environ | world | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors[-3000:]
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first["ranks"] == 2
    assert first["offered"] == 24  # 3 steps of 2 micro-steps of 2 samples on each of 2 ranks
    assert first["stored"] == 12
    assert first["resumed"]
    assert first["perplexity"] == pytest.approx(first["expected"], rel=1e-5)  # 7 samples are no 2 times 4
    assert (tmp_path / "checkpoint-2" / FILE).is_file()


# --- perplexity of earlier data --------------------------------------------------------------------------------------


def test_perplexity_of_earlier_data_is_logged(tmp_path):
    earlier = samples(7, seed=5)
    callback = EarlierPerplexity({"code": earlier})
    ours = trainer(tmp_path, callbacks=[callback], num_train_epochs=1, max_steps=-1)
    ours.train()
    assert [step for step, _ in callback.history] == [0, 12]
    logged = [each["perplexity_code"] for each in ours.state.log_history if "perplexity_code" in each]
    assert logged == [each["code"] for _, each in callback.history]
    assert logged[-1] == pytest.approx(perplexity(ours.model, earlier), rel=1e-5)


def perplexity(model, rows):
    total, count = 0.0, 0
    model.eval()
    for row in rows:
        logits = model(input_ids=row["input_ids"][None]).logits[0, :-1]
        total += F.cross_entropy(logits, row["input_ids"][1:], reduction="sum").item()
        count += len(row["input_ids"]) - 1
    return math.exp(total / count)


def test_perplexity_needs_a_trainer():
    with pytest.raises(UsageError, match="belongs to no trainer"):
        EarlierPerplexity({"code": samples(2)}).measure()


# --- what is refused -------------------------------------------------------------------------------------------------


def test_a_changed_tokenizer_or_vocabulary_is_refused(tmp_path):
    then, now = make_tokenizer(TEXTS), make_tokenizer(["other words"] * 4)
    ours = trainer(tmp_path / "a", tokenizer=then, max_steps=1)
    ours.train()
    ours.save_buffer(tmp_path)
    kept = {"buffer_from": str(tmp_path)}
    with pytest.raises(UsageError, match=r"was written with the tokenizer \w{16}, but here it is \w{16}"):
        trainer(tmp_path / "b", tokenizer=now, replay=kept)
    with pytest.raises(UsageError, match="was written with a vocabulary of 40, but here it is 41"):
        trainer(tmp_path / "b", tokenizer=then, model=network(vocab_size=41), replay=kept)
    then("padding and truncation do not count", padding="max_length", truncation=True, max_length=12)
    trainer(tmp_path / "b", tokenizer=then, replay=kept)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"buffer_size": 20}, "was made with buffer_size=10; here it is buffer_size=20"),
        ({"top_k": 7}, "was made with top_k=5; here it is top_k=7"),
        ({"top_k": None}, "was made with top_k=5; here it is top_k=None"),
        ({"regularizer": None}, "was made with regularizer=one; here it is regularizer=None"),
        ({"fixed_length": True}, "was made with fixed_length=False; here it is fixed_length=True"),
        ({"buffer_policy": "window", "buffer_size": 9}, "buffer_size=10, buffer_policy=reservoir; here it is"),
    ],
)
def test_a_buffer_of_other_arguments_is_refused_and_they_are_named(other, says, tmp_path):
    ours = trainer(tmp_path / "a", max_steps=2)
    ours.train()
    ours.save_buffer(tmp_path)
    theirs = trainer(tmp_path / "b", replay={"buffer_from": str(tmp_path)} | other)
    before = weights(theirs.model)
    with pytest.raises(UsageError, match=says):
        theirs.train()
    assert same(weights(theirs.model), before)


def test_a_buffer_without_outputs_is_no_buffer_for_a_regularizer(tmp_path):
    ours = trainer(tmp_path / "a", max_steps=2, replay={"regularizer": None})
    ours.train()
    ours.save_buffer(tmp_path)
    kept = {"buffer_from": str(tmp_path)}
    with pytest.raises(UsageError, match="was made with regularizer=None; here it is regularizer=kl"):
        trainer(tmp_path / "b", replay=kept).train()
    trainer(tmp_path / "b", max_steps=1, replay=kept | {"regularizer": None, "storage": "host"}).train()


def test_methods_of_peft_with_outputs_of_their_own_are_refused(tmp_path):
    peft = pytest.importorskip("peft")

    def tuned(kind):
        return peft.get_peft_model(network(), kind(task_type="CAUSAL_LM", num_virtual_tokens=3))

    for kind in (peft.PromptTuningConfig, peft.PromptEncoderConfig):
        with pytest.raises(UsageError, match=r"with P\w*_TUNING of peft: it puts 3 tokens .* Use LoRA"):
            trainer(tmp_path, model=tuned(kind))
    ours = trainer(tmp_path, model=tuned(peft.PrefixTuningConfig), max_steps=2)
    ours.train()
    assert ours.learner.buffer.stored == 8


def test_what_cannot_be_learned_is_refused_before_anything_moves(tmp_path):
    long = torch.arange(1, POSITIONS + 2)
    silent = samples(4)
    for row in silent:
        row["labels"] = torch.full_like(row["labels"], -100)
    cases = {
        f"a sample of {POSITIONS + 1} tokens is longer than the model allows, which is {POSITIONS}": [
            {"input_ids": long, "attention_mask": long, "labels": long}
        ],
        "no position is supervised": silent,
    }
    for message, data in cases.items():
        ours = trainer(tmp_path, data=data, max_steps=1)
        before = weights(ours.model)
        with pytest.raises(UsageError, match=message):
            ours.train()
        assert same(weights(ours.model), before)


def test_a_minibatch_without_labels_is_refused(tmp_path):
    ours = trainer(tmp_path)
    ours.data_collator = lambda rows: {"input_ids": collate(rows)["input_ids"]}
    with pytest.raises(UsageError, match="the minibatch has no labels"):
        ours.train()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replay": {"top_k": 41}}, "top_k=41 is larger than the vocabulary of 40 tokens"),
        ({"replay": {"replay": 0}}, "replay is a share of the minibatch"),
        ({"replay": {"top_k": 0}}, "top_k must be at least 1"),
        ({"label_smoothing_factor": 0.1}, "does not work with label_smoothing_factor"),
    ],
)
def test_wrong_settings_are_refused_at_once(options, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        trainer(tmp_path, **options)


def test_a_loss_that_the_model_adds_by_itself_is_refused(tmp_path):
    """It would be left out, silently: a mixture of experts keeps its router balanced with it."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 1, "vocab_size": VOCABULARY}
    model = MixtralForCausalLM(MixtralConfig(**sizes, output_router_logits=True))
    with pytest.raises(UsageError, match="does not work with output_router_logits, with which the model adds a loss"):
        trainer(tmp_path, model=model)


def test_replay_args_are_needed(tmp_path):
    with pytest.raises(UsageError, match="ReplayTrainer needs replay_args"):
        ReplayTrainer(model=network(), args=arguments(tmp_path), train_dataset=samples())


def test_observe_inside_a_training_step_is_refused(tmp_path):
    """The Trainer would step again with the same gradients."""

    class Wrong(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            learner = hf.ExperienceReplay(model, self.optimizer, buffer_size=4, class_dim=-1)
            return learner.observe({"input_ids": inputs["input_ids"]}, hf.next_tokens(inputs["labels"])).total

    wrong = Wrong(model=network(), args=arguments(tmp_path), train_dataset=samples(), data_collator=collate)
    before = weights(wrong.model)
    with pytest.raises(UsageError, match="observe inside the training_step of a Trainer"):
        wrong.train()
    assert same(weights(wrong.model), before)


def test_the_arguments_are_options_of_a_command_line():
    (parsed,) = HfArgumentParser(ReplayArguments).parse_args_into_dataclasses(["--buffer_size", "7", "--top_k", "3"])
    assert parsed == ReplayArguments(buffer_size=7, top_k=3)


def test_without_transformers_the_message_names_the_extra():
    code = "import sys; sys.modules['transformers'] = None; import holdfast.integrations.transformers"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'holdfast[transformers]'" in answer.stderr.splitlines()[-1]
