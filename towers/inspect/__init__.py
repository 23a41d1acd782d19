"""Whether what was built keeps its promises: the audit, and a comparison with one device."""
