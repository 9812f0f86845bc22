"""PostgreSQL's write-ahead log: the slot that keeps it, reading a range of it, decoding it, and snapshots beside it."""
