"""What a model's folder says: config.json, the pooler's files, the tokenizer's files."""
