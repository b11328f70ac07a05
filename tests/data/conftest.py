import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from fastsched.config import DataConfig
from fastsched.data.datasets import load_prompts

CHAT = ("{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}")
SPECIAL = ["<|end|>", "<|user|>", "<|system|>", "<|assistant|>", "<|bos|>"]


@pytest.fixture(scope="session")
def bpe_json():
    """A small byte-level BPE that puts a BOS token before plain text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    bpe.train_from_iterator((f"What is {a} + {a * 7}? Answer with only the number." for a in range(500)), trainer)
    bos = bpe.token_to_id("<|bos|>")
    bpe.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", bos)])
    return bpe.to_str()


@pytest.fixture
def make_tokenizer(bpe_json):
    def make(template=CHAT):
        return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(bpe_json), chat_template=template,
                                       bos_token="<|bos|>", eos_token="<|end|>", pad_token="<|end|>")

    return make


@pytest.fixture
def tokenizer(make_tokenizer):
    return make_tokenizer()


@pytest.fixture
def write_jsonl(tmp_path):
    def write(rows, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


@pytest.fixture
def load(tmp_path, tokenizer):
    def call(tok=tokenizer, seed=0, **options):
        return load_prompts(DataConfig(**{"size": 200, "eval_per_bin": 4, **options}), tok, seed, tmp_path / "cache")

    return call
