"""Data parallelism: buckets, ZeRO and fully_shard."""
