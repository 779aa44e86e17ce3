"""Contract suites: what a plug-in must keep, as pytest classes that its author subclasses.

    from baton.testing.policies import PolicyContract

    class TestMine(PolicyContract):
        def make(self):
            return MyPolicy()

Baton's own policies, backends and transports pass the same suites (docs/plugins.md).
"""
