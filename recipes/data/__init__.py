"""Text in, batches out: documents, tokens, packed rows, and a position that resumes exactly.

    data = build_data("stdlib", tokenizer=ByT5Tokenizer(), seq_len=1024, batch_size=2, packing="isolate", seed=0)
    batch = next(data.train)                       # never ends: epochs wrap, each in its own order
    loss = model(**model_inputs(batch, device), use_cache=False).loss
    for batch in data.eval(num_batches=8): ...     # the same batches at every call
    state = data.train.state_dict()                # JSON-able; the same on every rank
    data.train.load_state_dict(state)              # the next batch is the one that would have come

A batch is a plain dict (B rows, T tokens, `-100` = ignored label):

| key | value |
|---|---|
| `input_ids` | int64 (B, T) |
| `labels` | int64 (B, T), unshifted as Transformers wants them; the first label of each document and padding are -100 |
| `position_ids` | int64 (B, T), restart at 0 with each document (`isolate`) |
| `cu_seq_lens_q`, `_k` | int32 (S,): starts of documents in the flattened B*T tokens, then B*T repeated (`isolate`) |
| `max_length_q`, `_k` | int T, an upper bound of the documents' lengths that does not vary (`isolate`) |
| `num_tokens` | int, tokens that are not padding: for the meter |
| `num_labels` | int, labels that count after the shift, `(labels[:, 1:] != -100).sum()`: the divisor of the loss |

`model_inputs` keeps what `model.forward` accepts (`MODEL_KEYS`: all but `num_tokens` and `num_labels`). There is
never an `attention_mask`: rows are padded on the right only, where causal attention cannot see the padding, so flash
kernels stay eligible.

Packing: `isolate` documents of one row never see each other (needs `ckpt.attention.prepare(model, "isolate")`);
`concat` they do, and the end of one predicts the start of the next; `none` one document a row, truncated or padded
to T.

The package knows tokenizers, files and torch; it knows no Hydra and no training loop.
"""

from recipes.data.build import Data, build_data
from recipes.data.packing import IGNORE, MODEL_KEYS, model_inputs

__all__ = ["IGNORE", "MODEL_KEYS", "Data", "build_data", "model_inputs"]
