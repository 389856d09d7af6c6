"""The papers whose claims are judged. A folder for each: its title, claims, laws (closed forms) and published.csv.

A paper is read as a plug-in is (config.plugins): its dicts PAPERS, CLAIMS and LAWS, and its file published.csv.
Nothing else imports it, so to remove a paper is to delete its folder, and the presets that judge its claims. Papers do
not import one another: what several need is in rankbench.judging or rankbench.measures. The parentheses in a claim's
statement say what its measure returns.
"""

# Of their pages. Papers that are not named here come last.
ORDER = (
    *("dong_2021", "blog", "kim_2021", "amsel", "garg_2022", "wu_2024", "wu_2025", "noci_2022", "joseph_2024"),
    *("giorlandino_2025", "ali_2023", "he_2023", "wang_2022", "saxe_2014", "zhai_2023", "zhai_2026", "newhouse_2025"),
    *("sun_2025", "nait_saada_2025", "karagodin_2025", "bruno_2025", "chen_2026", "fedorov_2026", "chen_2020"),
    *("zhou_2024", "zhu_2024", "xie_2025", "hausdorff_1921", "queipo_2025", "qiu_2025", "lan_2020", "yu_2025"),
    *("isobe_2026", "own"),
)
