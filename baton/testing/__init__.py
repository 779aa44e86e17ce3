"""Contract suites: the tests that a plug-in must pass, as pytest classes to subclass.

    from baton.testing.policies import PolicyContract

    class TestMine(PolicyContract):
        def make(self):
            return MyPolicy()

Baton's own policies, backends and transports pass the same suites (docs/plugins.md).
"""
