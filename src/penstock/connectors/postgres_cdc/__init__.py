"""Mirror PostgreSQL tables: a first copy, then every change from the write-ahead log."""
