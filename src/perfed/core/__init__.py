"""The whole idea in a few files: model, data, method, messages. Imports nothing else of perfed."""
