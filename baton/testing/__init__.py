"""Contract suites: pytest classes with the tests that a plug-in must pass, to be subclassed.

    from baton.testing.policies import PolicyContract

    class TestMine(PolicyContract):
        def make(self):
            return MyPolicy()

Baton's own policies, backends and transports pass the same suites (docs/plugins.md).
"""
