"""Fields of the attention jobs' arguments, each an int64 (addresses and strides in bytes)."""

(QKV, QKV_STRIDE, M, HEADS, KV_HEADS, DIM, Q_NORM, K_NORM, NORM_EPS, COS, SIN, POSITIONS, SLOTS,
 KEYS, VALUES, CAPACITY, SCALE, WINDOW, OUT, OUT_STRIDE, RUNS, PARTIALS) = (
    8 * i for i in range(22)
)  # fmt: skip
FIELDS = 22
