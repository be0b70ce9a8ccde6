"""From a model on disk to a tree of modules: configuration, names, weights, tokenizer."""
