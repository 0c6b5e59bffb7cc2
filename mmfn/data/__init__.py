"""From files of conversations to packed batches."""
