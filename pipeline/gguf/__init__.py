"""The GGUF container: header bytes, header reader, resumable shard writer. Knows no recipes."""
