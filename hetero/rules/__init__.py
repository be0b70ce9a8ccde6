"""Rule files: the grammar, its checks, matching, explaining, migrating. Imports no torch."""

from hetero.rules.find import find_rules_dir
from hetero.rules.load import load_rules
from hetero.rules.matching import match
from hetero.rules.placement import Assignment, Placement
from hetero.rules.schema import Rule, RuleSet

__all__ = ["Assignment", "Placement", "Rule", "RuleSet", "find_rules_dir", "load_rules", "match"]
