"""The training data of a run: files, tokenization, and shuffled windows of tokens."""

from quantshard.tools.trainer.data.corpus import Corpus, Document, collect, collect_recorded, from_table
from quantshard.tools.trainer.data.tokenizer import END_OF_DOCUMENT, VOCABULARY, load_tokenizer
from quantshard.tools.trainer.data.windows import BatchLoader, Windows

__all__ = [
    "BatchLoader",
    "Corpus",
    "Document",
    "END_OF_DOCUMENT",
    "VOCABULARY",
    "Windows",
    "collect",
    "collect_recorded",
    "from_table",
    "load_tokenizer",
]
