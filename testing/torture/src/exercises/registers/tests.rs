use super::*;

#[test]
fn values_out_of_order_twice_or_missing_are_found() {
    let history = History::default();
    let check = |found: &[u64]| history.check("0-0", &[3, 5], found).is_ok();
    assert!(check(&[1, 3, 5]));
    for wrong in [&[1, 5, 3][..], &[3, 5, 5], &[1, 3]] {
        assert!(!check(wrong), "{wrong:?}");
    }
    history.with("0-0", |known| known.refused.insert(4));
    assert!(!check(&[3, 4, 5]), "4 was refused");
}
