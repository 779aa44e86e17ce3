"""The commands that are programs: their options are made of the dataclasses they run with."""
