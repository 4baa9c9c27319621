"""What every picture and table of a report says to a reader who has never seen one: what it is, what to look at."""

_HILL = (
    "Time runs from left to right, memory upwards. Memory rises in the forward pass and falls in the backward "
    "pass. "
)

NOTES = {
    "memory": _HILL
    + "The plan lowers the peak: it saves less of the forward pass (blue), and recomputes values (orange) when "
    "the backward pass needs them. The curves are the planner's model; the compiled peak is the compiler's "
    "own figure, and stays within the budget.",
    "plain memory": _HILL
    + "The peak is within the budget without a plan. The curve is the planner's model; the compiled peak is "
    "the compiler's own figure.",
    "loops": "A loop is drawn with the memory of one iteration; what all its iterations save appears at its "
    "end.",
    "copies": "The rows underneath are copies to and from host memory, which run beside the kernels: of "
    "{seconds}, a copy to the host is under way for {gone}, and a copy back for {back}.",
    "values": "Values that the forward pass makes and the backward pass reads, the largest first. “Save” keeps "
    "a value in memory. “Recompute” drops it and computes it again before that stage of the backward "
    "pass (0 is the first). “Offload” keeps it in host memory until that stage. “Drop” means that no "
    "operation needs it any more.",
    "modules": "The same bytes by module of the model. The longest bars show where the memory is. The last "
    "column is the time that recomputation takes there.",
    "peak": "What is in memory at the compiled program's peak, besides arguments and outputs, by the "
    "compiler's own schedule. “Other” belongs to the update or to the compiler. To save more memory, "
    "look here first: only these arrays count.",
    "rounds": "Each row is a plan that was compiled. Where the predicted and the compiled peak differ, the "
    "planner corrected its model by the difference and planned again. It returned the cheapest plan "
    "that fits. The gap bounds how much faster another plan could be in the planner's model.",
    "verified": "The compiler's figures for the program that runs. The last row is what is left of the budget.",
    "not compiled": "Nothing was compiled (`Planning(verify=False)`): all figures are the planner's model. "
    "Plan with `Planning(verify=True)` to have the compiler confirm the peak.",
}
