"""The command line: ``prism simulate``, ``validate``, ``schedule`` and ``bench``."""
