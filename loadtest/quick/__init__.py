"""The quick benchmark: measures one system in two minutes and judges it in words."""
