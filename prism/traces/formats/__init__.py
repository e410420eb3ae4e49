"""Other forms of traces: Chakra graphs, op-level parquet, plain tables of records."""
