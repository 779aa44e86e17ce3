"""The worker, which owns a device: KV memory, input batch, graphs, model runner, memory profile."""
