"""All that owns a device: KV memory, input batch, graphs, model runner, memory profile."""
