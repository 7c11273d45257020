"""The idea in a few files: method, model, data, clients, messages. It knows no other room of perfed."""
