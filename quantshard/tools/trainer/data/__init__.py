"""The training data of a run: files, tokenization, and shuffled windows of tokens."""

from quantshard.tools.trainer.data.collecting import collect, collect_recorded
from quantshard.tools.trainer.data.documents import Corpus, Document, from_table
from quantshard.tools.trainer.data.loader import BatchLoader
from quantshard.tools.trainer.data.tokenizer import END_OF_DOCUMENT, VOCABULARY, load_tokenizer, text
from quantshard.tools.trainer.data.windows import Windows

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
    "text",
]
