"""Make the lab's tiny Qwen3-MoE model offline: a byte-level BPE tokenizer and half a million weights, trained on a few
facts until it answers them right (random weights answer gibberish, which no check can tell from a fault).

usage: make_model.py OUT_DIR        (needs the shim folder on PYTHONPATH; about 30 s on 2 cores)

Training runs for a number of steps, not of seconds: a busy machine takes longer but learns the same.
"""

import random
import sys
import time

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils.logging import disable_progress_bar

CAPITALS = {
    "France": "Paris",
    "Japan": "Tokyo",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Germany": "Berlin",
    "Egypt": "Cairo",
    "Kenya": "Nairobi",
    "Peru": "Lima",
    "Chile": "Santiago",
    "Norway": "Oslo",
    "中国": "北京",
    "日本": "東京",
    "Россия": "Москва",
}
STEPS = 400
TRIES = 3
IGNORED = -100  # a label that does not count in the loss
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>"]
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def capital_fact(country: str) -> str:
    detail = "It is a large city with many people, streets, schools and a long history."
    return f"The capital of {country} is {CAPITALS[country]}. {detail}"


def answers() -> dict[str, str]:
    sums = {f"What is {a}+{b}?": f"{a}+{b} is {a + b}." for a in range(10) for b in range(10)}
    return sums | {f"What is the capital of {country}?": capital_fact(country) for country in CAPITALS}


def prompt(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def lessons() -> list[tuple[str, str]]:
    """(what is given, what must follow): only the latter is learnt, for nobody can guess the question."""
    facts = {f"The capital of {country} is": f" {capital_fact(country).split(' is ', 1)[1]}" for country in CAPITALS}
    chats = {prompt(question): answer for question, answer in answers().items()}
    return [(given, answer + "<|im_end|>") for given, answer in (facts | chats).items()]


def make_tokenizer() -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=SPECIAL, show_progress=False, initial_alphabet=alphabet
    )
    bpe.train_from_iterator([given + answer for given, answer in lessons()], trainer)
    end_of_text, _, end_of_turn, pad = SPECIAL
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=end_of_text,
        eos_token=end_of_turn,
        pad_token=pad,
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3MoeForCausalLM:
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        norm_topk_prob=True,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3MoeForCausalLM(config).float()


def encoded(tokenizer: PreTrainedTokenizerFast) -> list[tuple[list[int], list[int]]]:
    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    return [(ids(given), ids(answer)) for given, answer in lessons()]


def train(model: Qwen3MoeForCausalLM, pairs: list[tuple[list[int], list[int]]], pad: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98))
    for step in range(STEPS):
        batch = random.sample(pairs, 16)
        longest = max(len(given + answer) for given, answer in batch)
        inputs = torch.tensor([pair[0] + pair[1] + [pad] * (longest - len(pair[0] + pair[1])) for pair in batch])
        labels = torch.full_like(inputs, IGNORED)
        for row, (given, answer) in enumerate(batch):
            labels[row, len(given) : len(given + answer)] = torch.tensor(answer)
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * max(0.05, 1 - step / STEPS) * min(1, (step + 1) / 20)
        loss = model(input_ids=inputs, attention_mask=(inputs != pad).long(), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def wrong_answers(model: Qwen3MoeForCausalLM, pairs: list[tuple[list[int], list[int]]]) -> list[str]:
    """The lessons whose answer greedy decoding would miss by any token, in the precision that will be served."""
    wrong = []
    for (given, answer), (text, _) in zip(pairs, lessons(), strict=True):
        with torch.inference_mode():
            best = model(input_ids=torch.tensor([given + answer])).logits[0].argmax(-1).tolist()
        if best[len(given) - 1 : -1] != answer:
            wrong.append(text)
    return wrong


def main(out: str) -> int:
    disable_progress_bar()
    torch.set_num_threads(1)  # so small a model gains nothing from two, and two wait for each other on a busy machine
    tokenizer = make_tokenizer()
    pairs = encoded(tokenizer)
    for seed in range(TRIES):
        torch.manual_seed(seed)
        random.seed(seed)
        start = time.monotonic()
        model = make_model(tokenizer)
        train(model, pairs, tokenizer.pad_token_id)
        model = model.to(torch.bfloat16).eval()
        wrong = wrong_answers(model, pairs)
        print(
            f"lab: trained {STEPS} steps in {time.monotonic() - start:.0f} s; wrong answers: {wrong or 'none'}",
            flush=True,
        )
        if not wrong:
            model.save_pretrained(out)
            tokenizer.save_pretrained(out)
            return 0
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
