"""Tiny random encoders, made by transformers, with a tokenizer that knows pairs; and transformers' own answers."""

import string
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, BertModel, PreTrainedTokenizerFast

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def tokenizer() -> PreTrainedTokenizerFast:
    """Characters as words and parts of words, in BERT's form."""
    letters = list(string.ascii_lowercase + string.digits + string.punctuation)
    words = [*SPECIAL, *letters, *(f"##{each}" for each in letters)]
    made = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )  # fmt: skip


class Reference:
    """A model's folder, and what transformers says of it, prompt by prompt in float32."""

    def __init__(self, folder: Path, labels: int = 0):
        self.folder, self.tokenizer = str(folder), tokenizer()
        torch.manual_seed(7 + labels)
        config = BertConfig(
            vocab_size=len(self.tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=64, max_position_embeddings=64, num_labels=labels or 2, initializer_range=0.5,
        )  # fmt: skip
        made = BertForSequenceClassification(config) if labels else BertModel(config)
        self.model = made.eval()
        self.model.save_pretrained(self.folder)
        self.tokenizer.save_pretrained(self.folder)

    @torch.no_grad()
    def _run(self, *texts: str) -> torch.Tensor:
        # In lists: a second text that is empty by itself would be taken for none.
        output = self.model(**self.tokenizer(*([text] for text in texts), return_tensors="pt"))
        return (output.logits if hasattr(output, "logits") else output.last_hidden_state)[0]

    def embedding(self, text: str) -> list[float]:
        """The first token's vector, of length 1."""
        return torch.nn.functional.normalize(self._run(text)[0], dim=0).tolist()

    def score(self, *texts: str) -> float:
        """The probability of the one label, of a pair or of a text."""
        return torch.sigmoid(self._run(*texts)).item()
